"""Direct preference optimisation (arXiv 2305.18290) and losses of pairs like it."""

from torch import Tensor
from torch.nn.functional import logsigmoid

from megavlm.config.algorithm import DPO


def dpo(ratios: Tensor, lengths: Tensor, settings: DPO) -> Tensor:
    """Return the loss [S] of each pair of a chosen and a rejected response.

    ratios: [2, S], log p / p_reference in nats, summed over the tokens of each response: in row 0
        the chosen ones, in row 1 the rejected ones.
    lengths: [2, S], numbers of these tokens.

    With m the difference of the two ratios, sigmoid is -log sigmoid(beta m), equation 7 of the
    paper; with wrong labels -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m).
    """
    beta, wrong = settings.beta, settings.label_smoothing
    if settings.loss_type in ("sigmoid_norm", "ipo"):
        ratios = ratios / lengths.clamp(min=1)
    margins = ratios[0] - ratios[1]
    if settings.loss_type == "ipo":
        return (margins - 1 / (2 * beta)).square()
    if settings.loss_type == "hinge":
        return (1 - beta * margins).relu()
    right, flipped = -logsigmoid(beta * margins), -logsigmoid(-beta * margins)
    if settings.loss_type == "robust":
        return ((1 - wrong) * right - wrong * flipped) / (1 - 2 * wrong)
    return (1 - wrong) * right + wrong * flipped
