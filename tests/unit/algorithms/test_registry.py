"""Advantage estimators and policy losses by name and by import path."""

import subprocess
import sys

import pytest
import torch

from megavlm.algorithms import registry
from megavlm.algorithms.advantages import AdvantageInputs
from megavlm.algorithms.policy_loss import PolicyInputs
from megavlm.config.algorithm import GRPO, PPO, PolicyOptimization

OWN = "tests.unit.algorithms.own"

REFUSED = [
    (
        GRPO(policy_loss="gspoo"),
        "algorithm.policy_loss='gspoo' is unknown: did you mean gspo? Choose one of clip, gspo, "
        "cispo, sapo, or a function as package.module:function",
    ),
    (PPO(policy_loss="zzz"), "algorithm.policy_loss='zzz' is unknown: choose one of clip, gspo"),
    (GRPO(advantage_estimator="rlo"), "algorithm.advantage_estimator='rlo' is unknown: did you"),
    (
        GRPO(advantage_estimator="no_such_package.module:function"),
        "algorithm.advantage_estimator=no_such_package.module:function cannot be imported: No mod",
    ),
    (
        GRPO(policy_loss=f"{OWN}:nothing"),
        f"algorithm.policy_loss={OWN}:nothing cannot be imported: module",
    ),
    (GRPO(policy_loss=f"{OWN}:NUMBER"), f"algorithm.policy_loss={OWN}:NUMBER is not a function"),
    (
        PPO(policy_loss=f"{OWN}:three"),
        f"algorithm.policy_loss={OWN}:three must take two arguments, (inputs, settings), and",
    ),
    (
        GRPO(options={"temperature": 2.0}),
        "algorithm.options.temperature is a parameter of no function of yours in",
    ),
    (
        GRPO(policy_loss=f"{OWN}:three", options={"temperature": 2.0, "temprature": 1.0}),
        "algorithm.options.temprature is a parameter of no function of yours in",
    ),
    (
        GRPO(policy_loss=f"{OWN}:three", options={"inputs": 1, "temperature": 2.0}),
        "algorithm.options.inputs is a parameter of no function of yours in",
    ),
    (GRPO(responses_per_prompt=1), "algorithm.responses_per_prompt=1 leaves nothing to compare a"),
    (
        GRPO(responses_per_prompt=1, advantage_estimator=f"{OWN}:baseline"),
        f"a response with under algorithm.advantage_estimator={OWN}:baseline: raise it",
    ),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_a_mistake_is_one_sentence(settings: PolicyOptimization, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        registry.check(settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        *(GRPO(advantage_estimator=name) for name in registry.ADVANTAGE_ESTIMATORS),
        *(PPO(policy_loss=name) for name in registry.POLICY_LOSSES),
        GRPO(advantage_estimator="reinforce_plus_plus", responses_per_prompt=1),
        GRPO(advantage_estimator=f"{OWN}:grpo", policy_loss=f"{OWN}:plain", responses_per_prompt=1),
        PPO(policy_loss=f"{OWN}:clip", responses_per_prompt=1),
    ],
)
def test_what_is_taken_loads(settings: PolicyOptimization) -> None:
    registry.check(settings)
    assert callable(registry.load_policy_loss(settings))
    if isinstance(settings, GRPO):
        estimator = registry.load_advantage_estimator(settings)
        assert not (estimator.needs_group and settings.responses_per_prompt == 1)


def test_each_function_gets_the_options_that_it_has_parameters_for() -> None:
    settings = GRPO(
        policy_loss=f"{OWN}:three",
        advantage_estimator=f"{OWN}:scaled",
        options={"temperature": 2.0, "scale": 3.0},
    )
    registry.check(settings)
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 2.0]),
        sequence_ids=torch.tensor([0, 1]),
        group_ids=torch.tensor([0, 0]),
        has_reward=torch.tensor([True, True]),
    )
    estimator = registry.load_advantage_estimator(settings)
    assert estimator(inputs, settings).tolist() == [3.0, 6.0] and estimator.whiten
    zero = torch.zeros(2)
    tokens = PolicyInputs(
        logprobs=zero,
        old_logprobs=zero,
        advantages=torch.ones(2),
        sequence_ids=torch.tensor([0, 1]),
        num_sequences=2,
    )
    term = registry.load_policy_loss(settings)(tokens, settings)
    assert term.metrics["temperature"].tolist() == [2.0, 2.0]


def test_properties_are_the_estimator_s() -> None:
    whitened = [
        name
        for name in registry.ADVANTAGE_ESTIMATORS
        if registry.load_advantage_estimator(GRPO(advantage_estimator=name)).whiten
    ]
    assert whitened == ["reinforce_plus_plus", "reinforce_plus_plus_baseline"]
    own = registry.load_advantage_estimator(GRPO(advantage_estimator=f"{OWN}:grpo"))
    assert (own.whiten, own.needs_group) == (False, False)


def test_names_are_checked_without_torch() -> None:
    code = (
        "import sys; from megavlm.algorithms.registry import check; "
        "from megavlm.config.algorithm import GRPO; check(GRPO()); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
