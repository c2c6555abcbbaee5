"""The configuration as the model's own options."""

from megavlm.config.schema import Config
from megavlm.parallel import platform
from megavlm.parallel.mesh import Layout


def layout(config: Config) -> Layout:
    """ValueError for one that this machine's collectives cannot do."""
    parallel = config.parallel
    cut, together = parallel.expert_tensor, parallel.tensor * parallel.context
    if cut > 1 and together % cut and not platform.has_gpu():
        raise ValueError(
            f"parallel.expert_tensor={cut} cuts experts over data ranks, whose tokens differ in "
            "number, and gloo gathers equal numbers only: on a CPU set it to 1 or to a divisor of "
            f"parallel.tensor x parallel.context = {together}"
        )
    return Layout(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual=parallel.virtual,
        context=parallel.context,
        expert=parallel.expert,
        expert_tensor=cut,
    )
