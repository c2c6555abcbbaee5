"""One HTTP request's share of a rollout: which prompts, what is sent, what comes of the answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megavlm.inference.protocol import (
    Response,
    Sampling,
    continue_body,
    generate_body,
    parse_continue,
    parse_generate,
)

if TYPE_CHECKING:
    from megavlm.data.processor import Prompt

PROMPTS_PER_REQUEST = 16  # one request costs a server as much as a prompt of 25 tokens
TOKENS_PER_REQUEST = 256  # a prompt; for longer responses a request's own cost is nothing


@dataclass(eq=False)
class Request:
    """n new responses to each of `prompts`, or the rest of one prompt's `begun` responses.

    places: of the prompts in the rollout. not_before: in the event loop's time.
    last_url: of the server that failed it last.
    """

    places: list[int]
    prompts: Sequence["Prompt"]
    n: int
    begun: Sequence[Response] = ()
    not_before: float = 0.0
    last_url: str | None = None

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def source(self) -> str:
        return self.prompts[0].row.source

    @property
    def key(self) -> str:
        """The same for prompts that show the same images: their features are cached."""
        return "".join(image.key for image in self.prompts[0].images) or self.source

    def body(self, sampling: Sampling) -> dict[str, Any]:
        if self.begun:
            return continue_body(self.prompts[0], self._unfinished, sampling)
        return generate_body(self.prompts, self.n, sampling)

    def parse(self, answer: Any, sampling: Sampling) -> list[list[Response]]:
        """The responses of each prompt, those that were complete before among them. Raises as
        `parse_generate`.
        """
        if not self.begun:
            return parse_generate(answer, self.prompts, self.n, sampling)
        rest = iter(parse_continue(answer, self.prompts[0], self._unfinished, sampling))
        return [[r if r.is_complete else next(rest) for r in self.begun]]

    @property
    def _unfinished(self) -> list[Response]:
        return [response for response in self.begun if not response.is_complete]


def make_requests(
    prompts: Sequence["Prompt"],
    n: int,
    sampling: Sampling,
    begun: Sequence[Sequence[Response]],
    *,
    num_servers: int,
    concurrency: int,
    single: bool,
) -> list[Request]:
    """Requests for all prompts whose groups are not complete, those that were begun first.

    concurrency: prompts in flight at a server. single: a request for each prompt, so that an
    answer waits for no other.
    """
    continued = [
        Request([place], [prompts[place]], n, responses)
        for place, responses in enumerate(begun)
        if any(not r.is_complete for r in responses)
    ]
    fresh = [place for place, responses in enumerate(begun) if not responses]
    size = min(
        PROMPTS_PER_REQUEST,
        max(1, TOKENS_PER_REQUEST // sampling.max_new_tokens),
        concurrency,
        -(-len(fresh) // num_servers) or 1,
    )
    size = 1 if single else size
    parts = (fresh[start : start + size] for start in range(0, len(fresh), size))
    return [*continued, *(Request(part, [prompts[place] for place in part], n) for part in parts)]
