"""Run directories as a trainer leaves them, written through the package itself."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from megavlm.observability.metrics import MetricsWriter
from megavlm.observability.samples import SampleWriter


def share(value: float, count: int = 100) -> dict[str, Any]:
    return {"share": value, "count": count, "interval": [max(0, value - 0.1), min(1, value + 0.1)]}


def measure(**shares: float) -> dict[str, Any]:
    overall = sum(shares.values()) / len(shares)
    return {
        "overall": share(overall, 100 * len(shares)),
        "by_category": {category: share(value) for category, value in shares.items()},
    }


def evaluation(greedy: float, shuffled: float | None = 0.3, blind: float = 0.31) -> dict[str, Any]:
    """An evaluation in which every category has the same shares."""

    def everywhere(value: float) -> dict[str, Any]:
        return measure(colour=value, count=value)

    return {
        "greedy": everywhere(greedy),
        "sampled": everywhere(0.77),
        "valid": everywhere(0.98),
        "blind": everywhere(blind),
        "shuffled": None if shuffled is None else everywhere(shuffled),
        "seconds": 2.0,
        "failures": {},
    }


def image(key: str, size: tuple[int, int] = (8, 8)) -> tuple[str, Callable[[], bytes]]:
    buffer = BytesIO()
    Image.effect_noise(size, 100).save(buffer, "PNG")
    return key, buffer.getvalue


def group(
    prompt: str = "How many?",
    category: str = "count",
    texts: Sequence[str] = ("2", "3"),
    images: Sequence[tuple[str, Callable[[], bytes]]] = (),
) -> dict[str, Any]:
    """A group as SampleWriter takes it."""
    responses = [
        {"text": text, "reward": float(text == "2"), "correct": text == "2", "finish": "stop"}
        for text in texts
    ]
    return {
        "prompt": prompt,
        "answer": "2",
        "category": category,
        "source": "train.parquet:7",
        "images": images,
        "responses": responses,
    }


def metrics(step: int) -> dict[str, float]:
    return {
        "loss": 0.01,
        "reward": step / 10,
        "reward/count": step / 20,
        "accuracy": step / 10,
        "response_length": 2.0,
        "truncated_share": 0.0,
        "groups_without_signal": 0.25,
        "kl_reference": 0.001 * step,
        "entropy": 0.5,
        "clip_share": 0.01,
        "rollout_train_kl": 1e-9,
        "rollout_max_difference": 1e-6,
        "gradient_norm": 0.8,
        "learning_rate": 5e-4,
        "tokens_per_second": 6000.0,
        "seconds/rollout": 0.5,
        "seconds/update": 1.0,
        "seconds/total": 2.0,
        "memory_gib": 1.0,
    }


def write_run(
    folder: Path,
    *,
    steps: int = 5,
    groups: Sequence[dict[str, Any]] | None = None,
    after: dict[str, Any] | None = None,
) -> None:
    samples = SampleWriter(folder, num_steps=steps)
    with MetricsWriter(folder) as writer:
        writer.write_evaluation(0, evaluation(0.5))
        for step in range(1, steps + 1):
            writer.write(step, metrics(step))
            samples.write(step, groups or [group(images=[image(f"key{step}")])])
        writer.write_evaluation(steps, after or evaluation(0.9))
