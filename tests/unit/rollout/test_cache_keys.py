"""Keys under which servers reuse prefixes."""

from pathlib import Path

from megavlm.config.load import load
from megavlm.data.processor import Processor
from megavlm.rollout.sampler import at_version, make_sampling_params

RECIPE = Path(__file__).parents[3] / "recipes/debug/grpo_shapes.yaml"


def test_runs_and_versions_share_no_prefixes(processor: Processor) -> None:
    """A server may outlive a run, and the next run has weights of the same versions."""
    config = load(RECIPE, [])
    runs = [make_sampling_params(config, processor) for _ in range(2)]
    keys = {at_version(config, how, version).cache_key for how in runs for version in (None, 0, 1)}
    assert len(keys) == 6
