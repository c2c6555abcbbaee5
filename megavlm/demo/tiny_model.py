"""A tiny model with random weights, as a complete HuggingFace folder.

The folder holds the same files as a released model (config, generation config, safetensors,
tokenizer, chat template, processor configs), so transformers and SGLang load it like any other.
Only the sizes are small.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from megavlm.demo_folder import FAMILY
from megavlm.families import FAMILIES
from megavlm.model_config import trained_config
from megavlm.models.common.tiny import TinyFamily, TinySizes, TinyTokens, tiny_config, tiny_family
from megavlm.parallel.torchvision_ops import define_torchvision_operators


def make_tiny_model(
    folder: str | Path,
    texts: Iterable[str],
    *,
    seed: int,
    family: str = FAMILY,
    randomise_norms_and_biases: bool = False,
    max_vocab: int = 512,
    max_pixels: int | None = None,
    draft_head: bool = False,
    **sizes: Any,
) -> None:
    """Write a random model and a tokenizer trained on `texts` to `folder`.

    texts: training texts of the tokenizer; a frequent word becomes one token.
    family: the model_type, as in `families.FAMILIES`.
    randomise_norms_and_biases: draw norm weights around 1 and biases around 0 instead of exactly
        1 and 0, so that a test notices a norm or a bias that was left out or swapped; also draw
        routers that send tokens to all experts.
    max_vocab: limit of the byte-level BPE vocabulary, without special tokens.
    max_pixels: largest resized image, as the folder's image processor will enforce it; 1280
        image tokens by default.
    draft_head: also write random weights of a draft head; transformers' model has none.
    sizes: fields of TinySizes.

    Raises ValueError for an unknown family, and for sizes that the family does not allow.
    """
    folder, parts = Path(folder), tiny_family(family)
    tokenizer = train_tokenizer(texts, parts.tokens, max_vocab=max_vocab)
    vocab = tokenizer.get_vocab()
    ids = {token: vocab[token] for token in parts.tokens.special}
    # The vocabulary is a multiple of 64, as in released models, so that tensor parallelism can
    # split it.
    vocab_size = -(-len(tokenizer) // 64) * 64
    config = tiny_config(family, TinySizes(**sizes), vocab_size, ids)
    _save_model(folder, parts, config, seed=seed, randomise=randomise_norms_and_biases)
    if draft_head:
        _add_draft_head(folder / "model.safetensors", config, seed=seed)
    _save_processor(folder, parts.processor(config, tokenizer, max_pixels))


def train_tokenizer(
    texts: Iterable[str], tokens: TinyTokens, *, max_vocab: int
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with a family's special tokens and chat template, for any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max_vocab,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The words of the chat template are in every prompt, so each of them becomes one token.
    roles = [*tokens.roles] * 100
    texts = list(texts)
    tokenizer.train_from_iterator([*texts, *roles], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens.special])
    if any(tokens.tools[0] in text for text in texts):
        tokenizer.add_tokens([AddedToken(token) for token in tokens.tools])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=tokens.eos,
        pad_token=tokens.end_of_text,
        additional_special_tokens=list(tokens.special),
        chat_template=tokens.chat_template,
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
    )


def _save_model(
    folder: Path, parts: TinyFamily, config: PreTrainedConfig, *, seed: int, randomise: bool
) -> None:
    define_torchvision_operators()
    from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM

    holds_several = trained_config(config) is not config
    auto: Any = AutoModelForMultimodalLM if holds_several else AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config)
        trained = model.thinker if holds_several else model
        _slow_decay(trained)
        _fill_tables(trained)
        if randomise:
            _randomise(trained)
        _fill_untrained(model, trained)
    text = config.get_text_config()
    model.generation_config = GenerationConfig(
        bos_token_id=getattr(text, "bos_token_id", None),
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )
    model.save_pretrained(folder, save_original_format=parts.has_original_form)
    if parts.transposes_experts:
        _transpose_expert_stacks(folder / "model.safetensors")


def _slow_decay(model: Any) -> None:
    """Initialise Gated DeltaNet so that its state lasts for some tokens.

    With transformers' initialisation the state decays almost completely at each token: a tiny model
    would not learn to see, and transformers itself loses digits.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(".A_log"):
            decay = torch.linspace(0.02, 0.32, len(parameter), device=parameter.device)
            parameter.data = decay.log()


def _fill_tables(model: Any) -> None:
    """Initialise tables of positions that transformers leaves at zero, because a frozen tower would
    not see where a patch is.
    """
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            parameter.data.normal_(std=0.1)


def _fill_untrained(model: Any, trained: Any) -> None:
    """Initialise what is not part of the trained model, because transformers leaves some of these
    tensors as the memory was.
    """
    held = {id(parameter) for parameter in trained.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in held:
            parameter.data.normal_(std=0.02)


def _randomise(model: Any) -> None:
    routers = []
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms are 1 and biases 0: add noise around that
            parameter.data += 0.1 * torch.randn_like(parameter)
        elif name.endswith(".mlp.gate.weight"):
            routers.append(parameter)
    for router in routers:  # [experts, H]: logits of about unit variance
        router.data = torch.randn_like(router) / router.size(1) ** 0.5
    for name, buffer in model.named_buffers():  # with which routers choose experts
        if ".mlp.gate." in name:
            buffer.data += 0.3 * torch.randn_like(buffer)
    if routers:
        # Attention adds nearly the same vector to all tokens. A token's embedding must outweigh
        # it, so that tokens use different experts in the last layers, too.
        model.get_input_embeddings().weight.data *= 5


def _transpose_expert_stacks(path: Path) -> None:
    """Transpose the stacks of experts from [E, out, in], as transformers 5 saves them, to [E, in,
    out], the format of released files that SGLang and transformers read.
    """
    tensors = load_file(path)
    stacks = [name for name in tensors if ".mlp.experts." in name]
    if stacks:
        tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in stacks}
        save_file(tensors, path, metadata={"format": "pt"})


def _add_draft_head(path: Path, config: PreTrainedConfig, *, seed: int) -> None:
    entries = FAMILIES[config.model_type].mapping(config, draft_head=True)
    tensors, generator = load_file(path), torch.Generator().manual_seed(seed)
    for entry in entries:
        for name, shape in zip(entry.hf, entry.hf_shapes, strict=True):
            if name.startswith("mtp.") and name not in tensors:  # a stack is of many entries
                is_norm = len(shape) == 1  # zero-centred
                scale = 0.0 if is_norm else 0.02
                tensors[name] = scale * torch.randn(shape, generator=generator)
    save_file(tensors, path, metadata={"format": "pt"})


def _save_processor(folder: Path, processor: Any) -> None:
    processor.save_pretrained(folder)
    # Released folders have preprocessor_config.json, and tools look for it. transformers 5 only
    # writes the same content as a part of processor_config.json.
    processor.image_processor.save_pretrained(folder)
