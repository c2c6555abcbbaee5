"""Checks of a run before it uses a GPU or a server: files, columns, images, layout, ports.

Each raises ValueError with one sentence: the key, its value, the rule and the fix. Rules about the
configuration alone are in megavlm/config, checks of the model in model_folder.py, checks of the
layout in layout.py, and checks that need the tokenizer or tensors in dry_run.py. Not covered:
memory, and the number of the trainer's GPUs.
"""

import asyncio
import difflib
import importlib.util
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from megavlm.algorithms.registry import check as check_algorithm
from megavlm.config.algorithm import Algorithm, DataTraining, PolicyOptimization
from megavlm.config.environment import EnvironmentConfig
from megavlm.config.optimizer import Optimizer
from megavlm.config.rollout import Rollout
from megavlm.config.schema import Config
from megavlm.config.transports import TRANSPORT_TRAITS, check_one_machine
from megavlm.data.rows import Row, Rows, check_media, rejected_row
from megavlm.environments.agent import GATEWAY
from megavlm.environments.processes import make_environments
from megavlm.environments.registry import built_in_environments, find_environment
from megavlm.families import language_values
from megavlm.import_path import IMPORT_PATH
from megavlm.inference.errors import RolloutServerError
from megavlm.inference.server import require_free
from megavlm.inference.server_args import option_names
from megavlm.observability.trackers import check_trackers
from megavlm.rewards import registry
from megavlm.rewards.base import Example
from megavlm.rollout.rewards import make_reward_manager, reward_parts
from megavlm.run.checks.layout import check_ranks
from megavlm.run.checks.model_folder import check_checkpoint, check_model
from megavlm.run.checks.run_lock import check_free
from megavlm.run.model_paths import check_model_paths
from megavlm.subprocess_pool.failure import CallFailure
from megavlm.subprocess_pool.wire import frame, json_bytes

SAMPLE = 2000  # first rows of a data set, whose values and images are checked

Phase = Literal["train", "evaluate", "rollout"]  # the command that is run


def check(
    config: Config,
    *,
    world_size: int,
    phase: Phase = "train",
    files: bool = True,
    starts: bool = True,
) -> None:
    """Raise ValueError for the first thing that would end the run later.

    files: If false, check only the recipe itself, without files; for recipes whose model and data
    are on another machine.
    starts: If false, nothing is started, so run.dir and the ports of servers may be in use.
    """
    check_ranks(config, world_size)
    find_environment(config.environment.name)
    check_partial_rollouts(config)
    if isinstance(config.algorithm, PolicyOptimization):
        check_algorithm(config.algorithm)
    for part in reward_parts(config):
        registry.check_reward_name(part.name)
    key = "data.train_files" if phase != "evaluate" else "data.test_files"
    train_files = config.data.train_files if phase != "evaluate" else ()
    if not (train_files if phase != "evaluate" else config.data.test_files):
        raise ValueError(f"{key}=[] names no data: add {key}=[FILE.parquet]")
    if not files:
        return
    asyncio.run(_check_environment(config.environment))
    asyncio.run(make_reward_manager(config).close())
    values = check_model(Path(config.model.folder), config)
    if config.model.checkpoint is not None:
        check_checkpoint(Path(config.model.checkpoint), config, values)
    check_transformer_engine(config.optimizer)
    if phase == "train":
        check_linear_attention(values)
    check_run_dir(Path(config.run.dir))
    check_server_cache(config, phase)
    check_replay(config)
    check_trackers(config.run.trackers)
    check_server_args(config.rollout)
    if phase == "evaluate":
        check_model_paths(config)
    elif starts:
        check_free(config.run.dir)
    if starts:
        check_ports(config.rollout)
    if phase != "evaluate":
        check_handles(config.rollout)
    check_data(train_files, config, use_of(config.algorithm))
    check_data(config.data.test_files, config, "rewards" if evaluates(config, phase) else None)


async def _check_environment(settings: EnvironmentConfig) -> None:
    await (await make_environments(settings)).close()


def check_partial_rollouts(config: Config) -> None:
    """Raise ValueError if episodes that go on in a later step cannot stop in between, while the
    trainer has the GPUs: those of several turns.
    """
    rollout, name = config.rollout, config.environment.name
    if not (rollout.colocate and rollout.max_staleness) or isinstance(
        config.algorithm, DataTraining
    ):
        return
    if not find_environment(name).starts_from_row:
        whole = [name for name, found in built_in_environments().items() if found.starts_from_row]
        raise ValueError(
            f"rollout.max_staleness={rollout.max_staleness} with rollout.colocate=true stops "
            f"responses between steps, but environment.name={name} may have several turns: set "
            f"environment.name to one of {', '.join(whole)}, or rollout.max_staleness=0"
        )


def check_run_dir(folder: Path) -> None:
    """Raise ValueError if the directory cannot be created or written by this user."""
    if reason := _why_not_writable(folder):
        raise ValueError(f"run.dir={folder} cannot be written, because {reason}")


def check_server_cache(config: Config, phase: Phase) -> None:
    """Raise ValueError if servers that the run starts could not write their cache of compiled
    kernels (Triton's and others' are in SGLang's). They would end with a traceback.
    """
    rollout = config.rollout
    trains_on_data = isinstance(config.algorithm, DataTraining) or rollout.replay is not None
    if rollout.mode != "managed" or (trains_on_data and not evaluates(config, phase)):
        return
    given = os.environ.get("SGLANG_CACHE_DIR")
    folder = Path(given or "~/.cache/sglang").expanduser()
    if reason := _why_not_writable(folder):
        name = f"SGLANG_CACHE_DIR={given}" if given else f"HOME={os.environ.get('HOME', '')}"
        raise ValueError(
            f"{name}: servers cannot write {folder}, where SGLang keeps compiled kernels, because "
            f"{reason}: set SGLANG_CACHE_DIR to a folder that is writable"
        )


def _why_not_writable(folder: Path) -> str | None:
    """Return why the directory cannot be created or written by this user, None if it can."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is a file"
    try:  # mode bits do not tell: the disk may be read-only, or accept no files
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return f"{existing} is not writable ({error.strerror})"


def check_replay(config: Config) -> None:
    """Raise ValueError if the recorded rollouts do not reach the last step, or are in the run's own
    directory, because a run deletes later recorded steps there.
    """
    folder, last = config.rollout.replay, config.algorithm.steps
    if folder is None:
        return
    if Path(folder).resolve().is_relative_to(Path(config.run.dir).resolve()):
        raise ValueError(
            f"rollout.replay={folder} is in run.dir={config.run.dir}: give the replay a run.dir "
            "of its own"
        )
    from megavlm.rollout.recorded import RecordedRollouts  # late: torch takes seconds

    steps = RecordedRollouts(folder).steps()
    if last not in steps:
        held = f"has steps {steps[0]} to {steps[-1]}" if steps else "has no step_*.safetensors"
        raise ValueError(
            f"rollout.replay={folder} {held}, but algorithm.steps={last}: give RUN_DIR/rollouts of "
            "a run with run.record_rollouts, or as many steps as it has"
        )


def evaluates(config: Config, phase: Phase) -> bool:
    """Return True if the run evaluates on data.test_files."""
    evaluation = config.evaluation
    during = evaluation.every or evaluation.before or evaluation.after
    return phase == "evaluate" or bool(phase == "train" and during)


def use_of(algorithm: Algorithm) -> str:
    """Return the use of the training data's rows: sft, dpo or rewards."""
    return algorithm.name if isinstance(algorithm, DataTraining) else "rewards"


def check_data(files: Sequence[str], config: Config, use: str | None) -> None:
    """Check files and columns. In the first SAMPLE rows also check values, placeholders, images
    (except images at URLs), and the columns that their `use` needs.

    With data.bad_samples=skip one usable row is enough. Raises ValueError otherwise.
    """
    rows = Rows(files, config.data)
    if files and not rows:
        raise ValueError(f"{', '.join(files)}: no rows; give data files that have rows")
    errors = []
    for index in range(min(len(rows), SAMPLE)):
        try:
            row = rows.peek(index)
            check_media(row)
            _check_use(row, config, use)
        except ValueError as error:
            if config.data.bad_samples == "refuse":
                raise
            errors.append(error)
    if errors and len(errors) == min(len(rows), SAMPLE):
        raise ValueError(f"none of the first {len(errors)} rows can be used: {errors[0]}")


def _check_use(row: Row, config: Config, use: str | None) -> None:
    calls = row.response is not None and row.response.keys.get("tool_calls")
    if use in ("sft", "dpo") and not row.answer.strip() and not calls:
        raise ValueError(
            f"{row.source}: algorithm.name={use} needs an answer to learn, but this row has none: "
            "name its column in data.answer_key, or end the chat with the assistant's message"
        )
    if use == "dpo":
        rejected_row(row)
    if use != "rewards":
        return
    reward, name = config.reward, config.environment.name
    parts = reward_parts(config)
    is_program = name == GATEWAY and "command" in config.environment.options
    is_remote = any(registry.is_remote(part.name) for part in parts)
    _check_sent(row, json_bytes if is_program or is_remote else frame)
    is_own = name == GATEWAY or IMPORT_PATH.fullmatch(name)
    if is_own and not (reward.name or reward.parts):
        return  # a user's environment or agent may need no reward
    columns = Example(row.problem, row.answer, row.category, extra=row.extra).columns()
    for part in parts:
        try:
            registry.check_reward_row(part.name, columns, part.options)
        except ValueError as error:
            raise ValueError(f"{row.source}: {error}") from error


def _check_sent(row: Row, encode: Callable[[Any], bytes]) -> None:
    """Raise ValueError for an extra column that cannot be sent to a reward or an environment."""
    for name, value in row.extra.items():
        try:
            encode(value)
        except CallFailure as failure:
            raise ValueError(
                f"{row.source}: {name}: {failure.message}; take it out of data.extra_keys, or "
                "store it as text or bytes"
            ) from failure


def check_server_args(rollout: Rollout) -> None:
    """Raise ValueError if rollout.server_args has an option that SGLang does not have. One that is
    null is left out, so that a recipe can drop a default of megavlm for another SGLang.
    """
    given = [name for name, value in rollout.server_args.items() if value is not None]
    if not given:
        return
    known = option_names()
    for name in given:
        plain = name.lstrip("-").replace("-", "_")
        if plain not in known:
            near = difflib.get_close_matches(plain, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(
                f"rollout.server_args.{name} is not an option of the installed SGLang: {hint}"
                "python -m sglang.launch_server --help lists them"
            )


def check_transformer_engine(optimizer: Optimizer) -> None:
    """Raise ValueError if Transformer Engine is missing but the optimizer needs it, or if it is
    installed without its PyTorch extension. pip leaves the extension out unless it is requested,
    and megatron-core cannot be imported then.
    """
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        if optimizer.megatron_options["use_precision_aware_optimizer"]:
            raise ValueError(
                "optimizer.megatron.use_precision_aware_optimizer=true needs Transformer Engine's "
                "optimizer, but it is not installed: pip install --no-build-isolation "
                "'transformer-engine[core_cu13,pytorch]', or set it to false"
            )
        return
    package = Path(spec.origin).parent
    places = (package.parent, package, package / "wheel_lib")  # where it may be
    if not any(file for place in places for file in place.glob("transformer_engine_torch*.so")):
        raise ValueError(
            f"transformer_engine in {package} has no extension for PyTorch "
            "(transformer_engine_torch*.so): pip install --no-build-isolation "
            "'transformer-engine[core_cu13,pytorch]' builds it, or uninstall transformer-engine"
        )


def check_linear_attention(values: Mapping[str, Any]) -> None:
    """Raise ValueError if the model has linear attention that cannot be trained on this machine's
    GPU. values: The model's config.json.
    """
    if "linear_num_key_heads" not in language_values(values):
        return
    from megavlm.models.linear_attention.delta_rule import backward_refusal  # late, as torch is

    if reason := backward_refusal():
        raise ValueError(f"this model has layers of linear attention, but {reason}")


def check_ports(rollout: Rollout) -> None:
    """Raise ValueError if a port on which managed servers would listen is in use."""
    if rollout.mode != "managed" or rollout.port is None:
        return
    for index in range(rollout.servers):
        try:
            require_free(rollout.port + index)
        except RolloutServerError as error:
            raise ValueError(str(error)) from error


def check_handles(rollout: Rollout) -> None:
    """Raise ValueError if weights would be passed as GPU memory to a server on another machine.

    Call it on rank 0's machine.
    """
    if rollout.mode != "external" or not TRANSPORT_TRAITS[rollout.sync].one_machine:
        return
    remote = [url for url in rollout.urls if not is_here(str(urlsplit(url).hostname))]
    if not remote:
        return
    from megavlm.parallel import platform  # late: torch takes seconds, few need it

    if platform.has_gpu():
        found = f"rollout.urls holds {remote[0]} on another machine"
        check_one_machine(rollout.sync, found)


def is_here(host: str) -> bool:
    """Return True if a host name or address belongs to this machine, so that a socket can be bound
    to it.

    False for a name that does not resolve; connecting to the server reports that.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
                return True
            except OSError:
                pass
    return False
