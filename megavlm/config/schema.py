"""The configuration: one section per file of this folder."""

from dataclasses import asdict, dataclass
from typing import Any

from megavlm.config.algorithm import Algorithm
from megavlm.config.checkpoint import Checkpoint
from megavlm.config.curriculum import CurriculumConfig
from megavlm.config.data import Data
from megavlm.config.distillation import Distillation
from megavlm.config.environment import EnvironmentConfig
from megavlm.config.evaluation import Evaluation
from megavlm.config.lora import LoRA
from megavlm.config.model import Model
from megavlm.config.optimizer import Optimizer
from megavlm.config.parallel import Parallel
from megavlm.config.recompute import Recompute
from megavlm.config.reward import Reward
from megavlm.config.rollout import Rollout
from megavlm.config.run import RunConfig
from megavlm.config.speculation import Speculation


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run's complete configuration. Each key is documented in its section's file."""

    run: RunConfig
    model: Model
    lora: LoRA
    parallel: Parallel
    recompute: Recompute
    data: Data
    algorithm: Algorithm
    environment: EnvironmentConfig
    reward: Reward
    distillation: Distillation
    curriculum: CurriculumConfig
    rollout: Rollout
    speculation: Speculation
    optimizer: Optimizer
    evaluation: Evaluation
    checkpoint: Checkpoint

    @property
    def trains_tower(self) -> bool:
        """Return True if image features change from step to step, by training or by adapters."""
        model = self.model
        return not (model.freeze_tower and model.freeze_merger) or self.lora.adapts_tower

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with sections in the order above; tuples stay tuples."""
        return asdict(self)
