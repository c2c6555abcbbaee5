"""Staleness: tokens that older weights sampled than the weights that are trained."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from megavlm.inference.protocol import Response
from megavlm.rollout.trajectory import Group

_FRESH, _STALE = torch.tensor([False, True]).unbind()


def stale_tokens(response: Response, version: int) -> Tensor:
    """Return [L] bool: True for tokens that were sampled by other weights than `version`. The
    tokens share one value if they have one.
    """
    stale = {span.version != str(version) for span in response.spans}
    if len(stale) <= 1:
        return (_STALE if True in stale else _FRESH).expand(len(response.token_ids))
    flags = torch.zeros(len(response.token_ids), dtype=torch.bool)
    for span in response.spans:
        if span.version != str(version):
            flags[span.start : span.end] = True
    return flags


def oldest_version(group: Group) -> int:
    """Return the oldest weight version that sampled a token of a played group."""
    responses = [response for episode in group.episodes for response in episode.responses]
    return min(int(span.version) for response in responses for span in response.spans)


def staleness_metrics(
    responses: Sequence[Response], version: int | None = None
) -> dict[str, float]:
    """Return metrics of tokens from weights older than `version`, by default the newest that
    sampled: their share, the age of the oldest in steps, and the share of responses by the age of
    their oldest token. The result is empty if no token is older.
    """
    ages = [[(int(span.version), span.end - span.start) for span in r.spans] for r in responses]
    newest = max((v for spans in ages for v, _ in spans), default=0) if version is None else version
    lags = [(newest - v, size) for spans in ages for v, size in spans]
    if not any(lag for lag, _ in lags):
        return {}
    oldest = Counter(newest - min(v for v, _ in spans) for spans in ages if spans)
    return {
        "stale_share": sum(size for lag, size in lags if lag) / sum(size for _, size in lags),
        "stale_steps": float(max(lag for lag, _ in lags)),
        **{f"staleness/{age}": oldest[age] / oldest.total() for age in range(max(oldest) + 1)},
    }
