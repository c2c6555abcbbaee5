"""Work of a recipe's step: prompts, responses and their lengths."""

from dataclasses import dataclass
from typing import Any

from megavlm.config.algorithm import PolicyOptimization
from megavlm.config.schema import Config
from megavlm.families import family
from megavlm.planner.memory import image_tokens

TEXT_TOKENS = 128  # assumed text tokens of a prompt, in addition to its image
GOLDEN = 0.6180339887498949  # golden ratio: its multiples are spread evenly over [0, 1)


@dataclass(frozen=True)
class StepWork:
    """Work of a step. prompts: Number of prompts. responses: Number of responses per prompt.
    prompt: Tokens of a prompt. response: Mean tokens of a response. longest: Tokens of the longest
    response. patches: Patches of an image.
    """

    prompts: int
    responses: int
    prompt: int
    response: int
    longest: int
    patches: int

    @classmethod
    def of(cls, config: Config, hf_config: Any) -> "StepWork":
        """Return a recipe's step, assuming one image of the maximum size per prompt and a mean
        response length of half the maximum.
        """
        algorithm = config.algorithm
        assert isinstance(algorithm, PolicyOptimization)
        merge = family(hf_config.model_type).patch_sizes(hf_config).merge
        image, longest = int(image_tokens(config, hf_config)), config.rollout.max_new_tokens
        return cls(
            algorithm.prompts_per_step,
            algorithm.responses_per_prompt,
            min(image + TEXT_TOKENS, config.data.max_prompt_tokens),
            longest // 2,
            longest,
            image * merge**2,
        )

    @property
    def tokens(self) -> int:
        return self.prompts * (self.prompt + self.responses * self.response)

    @property
    def targets(self) -> int:
        return self.prompts * self.responses * self.response

    @property
    def _skew(self) -> float:
        """Exponent s of the lengths longest * u^s with u uniform in [0, 1], whose mean is
        longest / (s + 1). 1, where the mean is half of the longest, is a uniform distribution.
        """
        return self.longest / self.response - 1

    def lengths(self, count: int) -> list[int]:
        """Return the lengths of `count` responses: quantiles of the distribution, up to the
        longest, in an order that mixes them.
        """
        order = sorted(range(count), key=lambda i: i * GOLDEN % 1)
        return [max(1, round(self.longest * ((i + 1) / count) ** self._skew)) for i in order]

    @property
    def resident(self) -> float:
        """Mean tokens that running responses have at any time, E[l^2] / 2 E[l]: long responses run
        for longer.
        """
        skew = self._skew
        return self.longest * (skew + 1) / (2 * (2 * skew + 1))
