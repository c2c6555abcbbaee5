"""Recorded rollouts: one safetensors file per step with the step's groups, for replay and
inspection.

`token_ids` [T] int32 and `logprobs` [N] float32 are concatenated in the order of the metadata
`groups`, a JSON list. For each group they have the tokens of the prompt; then, for each episode,
the tokens of each response and of the observation after it, or the whole prompt after it if this
does not extend the turn. `logprobs` has values for response tokens only, rounded to float32 as in
the trainer. `routed_experts` [R, layers, top-k] has the routed experts of all responses, one after
the other; it is absent from runs without algorithm.routing_replay. `kept_ids` [K] int32 has the
tokens that rollout.top_p and rollout.top_k kept, `kept_sizes` [N] int32 of them for each response
token; they are absent where nothing was left out. `teacher_logprobs` has the log-probs of scored
responses by a teacher, and `teacher_top_ids` [K] int32 and `teacher_top_logprobs` its likeliest
tokens, as many for each response token. Images are given as numbers: 0, 1, ... are the row's images
and videos, and -1, -2, ... those that the environment made, with their pixels in `pixels.0`,
`pixels.1`, ..., the pictures of images in tiles in `picture.0`, `picture.1`, ..., and their slices
in `slices.0`, ...
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from torch import Tensor

from megavlm.arrays import Arrays, from_bytes, to_bytes
from megavlm.data.media.audio import ProcessedAudio
from megavlm.data.media.image_processing import PatchFormat, ProcessedImage
from megavlm.data.media.videos import ProcessedVideo
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Rows
from megavlm.environments.base import RecordedAction
from megavlm.inference.protocol import KeptTokens, Response, TopTokens, VersionSpan
from megavlm.rewards.base import Score
from megavlm.rollout.trajectory import Episode, Group
from megavlm.writing import write_whole

ROLLOUTS_FOLDER = "rollouts"  # in the run directory
_PREFIX, _SUFFIX = "step_", ".safetensors"


class RecordedRollouts:
    """A folder of recorded steps."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    def path(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step:06d}{_SUFFIX}"

    def steps(self) -> list[int]:
        """Return the numbers of the recorded steps, in ascending order."""
        names = (path.name for path in self.folder.glob(f"{_PREFIX}*{_SUFFIX}"))
        numbers = (name.removeprefix(_PREFIX).removesuffix(_SUFFIX) for name in names)
        return sorted(int(number) for number in numbers if number.isdecimal())

    def remove_after(self, step: int) -> None:
        """Delete the steps after `step`, because a run that resumes from it writes them again."""
        for later in self.steps():
            if later > step:
                self.path(later).unlink()

    def save(self, step: int, groups: Sequence[Group]) -> None:
        """Write a step's played groups. An earlier file of the step is replaced."""
        written = _Writer()
        records = [written.group(group) for group in groups]
        values = {"groups": records, "formats": written.formats}
        write_whole(self.path(step), to_bytes(written.arrays() | written.pixels(), values))

    def load(self, step: int, rows: Rows, processor: Processor) -> list[Group]:
        """Return a step's groups. Raises ValueError if the step is missing or incomplete, or if the
        data and the processor now give other prompts for its rows.
        """
        path = self.path(step)
        try:
            arrays, values = from_bytes(path.read_bytes())
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"rollout.replay: {path} is not a step that run.record_rollouts wrote ({error}): "
                "give the folder of a run that recorded this step"
            ) from error
        reader = _Reader(arrays, values["formats"], rows, processor)
        return [reader.group(record) for record in values["groups"]]


class ResponseWriter:
    """Collects the tokens of responses and the arrays that belong to them, in order."""

    def __init__(self) -> None:
        self._parts: dict[str, list[npt.NDArray[Any]]] = {
            "token_ids": [np.empty(0, np.int32)],
            "logprobs": [np.empty(0, np.float32)],
            "routes": [],
            "kept_sizes": [],
            "kept_ids": [],
            "teacher_logprobs": [],
            "teacher_top_ids": [],
            "teacher_top_logprobs": [],
        }

    def arrays(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(np.concatenate(x)) for name, x in self._parts.items() if x}

    def response(self, response: Response) -> dict[str, Any]:
        """Add a response. Returns the number of its tokens, and what is not an array."""
        self._parts["logprobs"].append(response.logprobs)
        record: dict[str, Any] = {
            "tokens": self._add(response.token_ids),
            "finish": response.finish,
            "weight_version": response.weight_version,
            "spans": [[span.version, span.start, span.end] for span in response.spans],
        }
        if response.routed_experts is not None:
            self._parts["routes"].append(response.routed_experts)
            record["routes"] = len(response.routed_experts)
        if response.kept is not None:
            self._parts["kept_sizes"].append(response.kept.sizes)
            self._parts["kept_ids"].append(response.kept.ids)
            record["kept"] = len(response.kept.ids)
        if response.teacher_logprobs is not None:
            self._parts["teacher_logprobs"].append(response.teacher_logprobs)
            record["teacher_top"] = 0
        if response.teacher_top is not None:
            ids, logprobs = response.teacher_top
            self._parts["teacher_top_ids"].append(ids.ravel())
            self._parts["teacher_top_logprobs"].append(logprobs.ravel())
            record["teacher_top"] = ids.shape[1]
        return record

    def _add(self, ids: Sequence[int] | npt.NDArray[np.int32]) -> int:
        self._parts["token_ids"].append(np.asarray(ids, np.int32))
        return len(ids)


class ResponseReader:
    """Reads the responses of a ResponseWriter, in the same order."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = {name: array.numpy() for name, array in arrays.items()}
        self._taken = Counter[str]()

    def response(self, record: Mapping[str, Any]) -> Response:
        num_tokens, kept, teacher, top = record["tokens"], None, None, None
        if "kept" in record:
            sizes = self._take("kept_sizes", num_tokens)
            kept = KeptTokens(sizes, self._take("kept_ids", record["kept"]))
        if "teacher_top" in record:
            teacher = self._take("teacher_logprobs", num_tokens)
        if k := record.get("teacher_top"):
            parts = (self._take(f"teacher_top_{x}", k * num_tokens) for x in ("ids", "logprobs"))
            top = TopTokens(*(part.reshape(num_tokens, k) for part in parts))
        return Response(
            self._take("token_ids", num_tokens),
            self._take("logprobs", num_tokens),
            record["finish"],
            record["weight_version"],
            tuple(VersionSpan(*span) for span in record["spans"]),
            self._take("routes", record["routes"]) if "routes" in record else None,
            kept=kept,
            teacher_logprobs=teacher,
            teacher_top=top,
        )

    def _take(self, name: str, count: int) -> npt.NDArray[Any]:
        start = self._taken[name]
        self._taken[name] += count
        return self._arrays[name][start : start + count]


class _Writer(ResponseWriter):
    """Collects the tokens, log-probs and pixels of groups, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[str, ProcessedImage] = {}  # images from environments, by key

    @property
    def formats(self) -> list[list[Any]]:
        """Key and patch format of each image that an environment made, and its `_timing`."""
        return [[image.key, asdict(image.format), *_timing(image)] for image in self._own.values()]

    def pixels(self) -> dict[str, Tensor]:
        images = list(enumerate(self._own.values()))
        pixels = {f"pixels.{i}": image.contents[0] for i, image in images}
        pixels |= {f"slices.{i}": x.slices for i, x in images if x.slices is not None}
        return pixels | {f"picture.{i}": x.picture for i, x in images if x.picture is not None}

    def group(self, group: Group) -> dict[str, Any]:
        prompt, start = group.prompt, group.start
        known = {key: number for number, key in enumerate(_keys(prompt))}
        record = {
            "row": prompt.row.index,
            "source": prompt.row.source,
            "images": _keys(prompt),
            "tokens": self._add(prompt.short_ids),
        }
        if not _are_equal(start, prompt):
            record["start"] = self._shown(start, 0, 0, known)
        return record | {"episodes": [self._episode(e, start, known) for e in group.episodes]}

    def _episode(self, episode: Episode, start: Prompt, known: Mapping[str, int]) -> dict[str, Any]:
        record, turns = dict[str, Any](), []
        if not _are_equal(episode.prompts[0], start):
            record["start"] = self._whole(episode.prompts[0], known)
        for number, (prompt, response) in enumerate(
            zip(episode.prompts, episode.responses, strict=True)
        ):
            turn = self.response(response) | {"reward": episode.rewards[number]}
            if actions := episode.actions[number]:
                turn["actions"] = [action.values() for action in actions]
            for following in episode.prompts[number + 1 : number + 2]:
                if _extends(following, prompt, response):
                    before = len(prompt.short_ids) + len(response.token_ids)
                    turn["next"] = self._shown(following, before, len(prompt.images), known)
                    turn["next"]["message"] = following.row.problem
                else:
                    turn["next"] = self._whole(following, known) | {"is_whole": True}
            turns.append(turn)
        score = episode.score
        score_record = asdict(score) | {"parts": dict(score.parts)}
        counts = {"counts": dict(episode.counts)} if episode.counts else {}
        return record | {"turns": turns, "score": score_record} | counts

    def _whole(self, prompt: Prompt, known: Mapping[str, int]) -> dict[str, Any]:
        return self._shown(prompt, 0, 0, known) | {"message": prompt.row.problem}

    def _shown(
        self, prompt: Prompt, num_ids: int, num_images: int, known: Mapping[str, int]
    ) -> dict[str, Any]:
        """Add a prompt's tokens after the first `num_ids` and images after the first
        `num_images`.
        """
        images = [self._place(image, known) for image in prompt.images[num_images:]]
        return {"tokens": self._add(prompt.short_ids[num_ids:]), "images": images}

    def _place(self, image: ProcessedImage, known: Mapping[str, int]) -> int:
        key = _key(image)
        if key in known:
            return known[key]
        self._own.setdefault(key, image)
        return -1 - list(self._own).index(key)


class _Reader(ResponseReader):
    """Reads the groups of a _Writer, in the same order."""

    def __init__(
        self,
        arrays: Arrays,
        formats: Iterable[Sequence[Any]],
        rows: Rows,
        processor: Processor,
    ) -> None:
        super().__init__(arrays)
        self._own = [_image(arrays, number, *values) for number, values in enumerate(formats)]
        self._rows, self._processor = rows, processor

    def group(self, record: Mapping[str, Any]) -> Group:
        index, ids = record["row"], tuple(self._take("token_ids", record["tokens"]).tolist())
        prompt = self._processor.prompt(self._rows[index]) if index < len(self._rows) else None
        if prompt is None or prompt.short_ids != ids or _keys(prompt) != record["images"]:
            raise ValueError(
                f"rollout.replay: {record['source']} has other tokens or images than when it was "
                "recorded: use the data files, the model folder and the data keys of "
                "the recorded run"
            )
        start = prompt
        if "start" in record:
            start = self._prompt(prompt, prompt, (), (), record["start"])
        return Group(prompt, episodes=[self._episode(prompt, start, e) for e in record["episodes"]])

    def _episode(self, base: Prompt, start: Prompt, record: Mapping[str, Any]) -> Episode:
        if "start" in record:
            start = self._prompt(base, start, (), (), record["start"])
        prompt: Prompt | None = start
        episode = Episode(start)
        episode.count(record.get("counts", {}))
        score = Score(**record["score"])
        for turn in record["turns"]:
            assert prompt is not None
            response, following = self.response(turn), None
            if "next" in turn:
                before = (*prompt.short_ids, *response.token_ids.tolist()), prompt.images
                if "is_whole" in turn["next"]:
                    before = (), ()
                following = self._prompt(base, prompt, *before, turn["next"])
            text = self._processor.decode(response.token_ids.tolist())
            actions = [RecordedAction(**action) for action in turn.get("actions", ())]
            episode.add_turn(response, text, turn["reward"], score, following, actions)
            prompt = following
        return episode

    def _prompt(
        self,
        base: Prompt,
        prompt: Prompt,
        ids: Sequence[int],
        images: Sequence[ProcessedImage],
        shown: Mapping[str, Any],
    ) -> Prompt:
        """Return the prompt of `ids` and `images`, followed by the tokens and images in `shown`."""
        row = prompt.row
        if "message" in shown:
            row = replace(row, problem=shown["message"])
        added = [base.images[n] if n >= 0 else self._own[-1 - n] for n in shown["images"]]
        tokens = self._take("token_ids", shown["tokens"]).tolist()
        return self._processor.with_images(row, [*ids, *tokens], [*images, *added])


def _are_equal(prompt: Prompt, other: Prompt) -> bool:
    return prompt.short_ids == other.short_ids and _keys(prompt) == _keys(other)


def _extends(following: Prompt, prompt: Prompt, response: Response) -> bool:
    known = (*prompt.short_ids, *response.token_ids.tolist())
    images = _keys(prompt)
    return following.short_ids[: len(known)] == known and _keys(following)[: len(images)] == images


def _keys(prompt: Prompt) -> list[str]:
    return [_key(image) for image in prompt.images]


def _key(image: ProcessedImage) -> str:
    """Return the key of an image, and of a video with its times, on which positions depend."""
    return " ".join([image.key, *map(str, _timing(image))])


def _timing(image: ProcessedImage) -> list[list[float] | int]:
    """Return the times of a video, or the number of tokens of a clip of audio."""
    if isinstance(image, ProcessedAudio):
        return [image.length]
    if not isinstance(image, ProcessedVideo):
        return []
    return [[image.seconds_per_grid, *image.times]]


def _image(
    arrays: Arrays,
    number: int,
    key: str,
    how: Mapping[str, Any],
    timing: Sequence[float] | int = (),
) -> ProcessedImage:
    pixels, format_ = arrays[f"pixels.{number}"], PatchFormat.from_values(how)
    if isinstance(timing, int):
        return ProcessedAudio(key, pixels, format_, length=timing)
    if timing:
        step, *shown = timing
        return ProcessedVideo(key, pixels, format_, times=tuple(shown), seconds_per_grid=step)
    picture, slices = (arrays.get(f"{name}.{number}") for name in ("picture", "slices"))
    return ProcessedImage(key, pixels, format_, picture=picture, slices=slices)
