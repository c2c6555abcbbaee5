import socket
from pathlib import Path

import pytest

from megavlm.models.linear_attention import delta_rule
from megavlm.parallel import platform
from megavlm.run.checks.preflight import check_linear_attention, is_here
from tests.unit.run.checks import WriteRecipe, check, refused

REMOTE = "http://192.0.2.1:30000"  # an address for documentation: no machine has it
HERE = "http://127.0.0.1:30000"


def external(*urls: str) -> tuple[str, str]:
    return "rollout.mode=external", f"rollout.urls=[{', '.join(urls)}]"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "has_gpu", lambda: True)


def test_port_in_use(write_recipe: WriteRecipe) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        text = refused(write_recipe(), f"rollout.port={port}")
    assert str(port) in text and "in use" in text
    check(write_recipe(), f"rollout.port={port}")


def test_handles_of_gpu_memory_stay_on_their_machine(write_recipe: WriteRecipe, gpu: None) -> None:
    tensor = "rollout.sync=tensor"
    text = refused(write_recipe(), *external(HERE, REMOTE), tensor)
    assert f"rollout.urls holds {REMOTE} on another machine" in text
    assert tensor in text and "set rollout.sync to distributed, store or disk" in text
    for fine in (
        (*external(HERE, "http://localhost:30001"), tensor),
        external(REMOTE),
        (*external(REMOTE), "rollout.sync=disk"),
        (),
    ):
        check(write_recipe(), *fine)
    check(write_recipe(), *external(REMOTE), tensor, phase="evaluate")  # which pushes nothing


def test_what_is_here() -> None:
    assert is_here("localhost") and is_here("127.0.0.1") and is_here(socket.gethostname())
    assert not is_here("192.0.2.1") and not is_here("2001:db8::1")
    assert not is_here("no-such-host.invalid")


@pytest.mark.parametrize("place", ["", "transformer_engine", "transformer_engine/wheel_lib"])
def test_transformer_engine_without_its_extension(
    write_recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    package = tmp_path / "packages" / "transformer_engine"
    (package / "wheel_lib").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(package.parent)
    text = refused(write_recipe())
    assert f"transformer_engine in {package} has no extension for PyTorch" in text
    assert "pip install --no-build-isolation 'transformer-engine[core_cu13,pytorch]'" in text
    (package.parent / place / "transformer_engine_torch.cpython-311-x86_64-linux-gnu.so").touch()
    check(write_recipe())


@pytest.mark.parametrize(
    ("triton", "tilelang", "is_hopper", "is_refused"),
    [
        ("3.4.0", None, True, True),
        ("3.6.0", None, True, True),
        ("3.3.1", None, True, False),
        ("3.7.1", None, True, False),
        ("3.6.0", "0.1.9", True, False),
        ("3.6.0", None, False, False),
        (None, None, True, False),
    ],
)
def test_linear_attention_that_its_kernel_refuses_to_train(
    monkeypatch: pytest.MonkeyPatch,
    triton: str | None,
    tilelang: str | None,
    is_hopper: bool,
    is_refused: bool,
) -> None:
    installed = {"triton": triton, "tilelang": tilelang}
    monkeypatch.setattr(delta_rule, "_installed", installed.get)
    monkeypatch.setattr(platform, "is_hopper", lambda: is_hopper)
    values = {"text_config": {"linear_num_key_heads": 16}}
    if is_refused:
        with pytest.raises(ValueError, match=rf"refuses .* Triton {triton} on a Hopper GPU.*: pip"):
            check_linear_attention(values)
    else:
        check_linear_attention(values)
    check_linear_attention({"text_config": {}})


def test_an_optimizer_without_transformer_engine(write_recipe: WriteRecipe) -> None:
    keys = ("model.dtype=bfloat16", "optimizer.megatron.use_precision_aware_optimizer=true")
    text = refused(write_recipe(), *keys)
    assert text.startswith(f"{keys[1]} needs Transformer Engine's optimizer, but it is not")
