import json
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from megavlm.config.checkpoint import CRITIC, POLICY, SUPERVISED, nearest_metrics
from megavlm.config.evaluation import MEASURES
from megavlm.config.load import load
from megavlm.config.model import Model
from megavlm.config.schema import Config
from tests.support.glossary import entries, unexplained

BASE = {"run": {"dir": "x"}, "model": {"folder": "m"}}
SFT = "algorithm.name=sft"
DPO = ("algorithm.name=dpo", "data.rejected_key=rejected")
FORWARD = "distillation.divergence=forward_topk"
TEACHER = "distillation.teachers.large.urls=[http://node:30000]"
SELF = "distillation.teachers.itself.hint=It is {answer}"
FILES = "data.test_files=[t]"
KEEP = ("checkpoint.every=10", "checkpoint.keep_last=2")
AWARE = "optimizer.megatron.use_precision_aware_optimizer=true"
MOMENT = "optimizer.megatron.exp_avg_dtype=bfloat16"
GREEDY = (FILES, "checkpoint.best_metric=evaluation/greedy")

# Overrides that break one rule, and what its sentence says.
BROKEN = {
    ("optimizer.lr=0",): "optimizer.lr=0.0 is out of range: set it to a number above 0",
    ("optimizer.lr=.nan",): "optimizer.lr=nan is out of range",
    ("optimizer.lr=.inf",): "optimizer.lr=inf is out of range",
    ("optimizer.megatron.adam_beta2=1.0",): "out of range: set it to a number between 0 and 1",
    ("optimizer.megatron.overlap_grad_reduce=1",): "is out of range: set it to true or false",
    (MOMENT.replace("bfloat16", "float16"), AWARE): "set it to float32 or bfloat16",
    (
        "optimizer.megatron.overlap_grad_reduces=true",
    ): "is not an option of megatron-core that recipes set: did you mean overlap_grad_reduce? they",
    ("optimizer.megatron.use_megatron_fsdp=true",): "they are adam_beta1, adam_beta2, adam_eps, ov",
    (
        "optimizer.megatron.overlap_param_gather=true",
    ): "optimizer.megatron.overlap_param_gather has no effect without overlap_grad_reduce: set opt",
    (
        AWARE,
        "model.dtype=float32",
    ): "use_precision_aware_optimizer=true keeps what weights in bfloat16 lack, but model.dtype=fl",
    (
        "optimizer.offload=true",
        "rollout.colocate=true",
    ): "optimizer.offload=true moves the optimizer's state at each update, and rollout.colocate=tr",
    (MOMENT,): "exp_avg_dtype has no effect without use_precision_aware_optimizer: set optimizer.m",
    (
        AWARE,
        "optimizer.megatron.exp_avg_sq_dtype=bfloat16",
        "optimizer.megatron.adam_beta2=0.999",
    ): "optimizer.megatron.adam_beta2=0.999 changes the second moment by less than optimizer.megat",
    ("run.seed=-1",): "run.seed=-1 is out of range: set it to a number at least 0",
    (
        "run.seed=" + "9" * 400,
    ): f"is out of range: set it to a number at least 0 and at most {2**63 - 1}",
    (f"run.seed={2**63}",): f"set it to a number at least 0 and at most {2**63 - 1}",
    ("rollout.port=65536",): "out of range: set it to a number at least 1 and at most 65535",
    ("rollout.temperature=0",): "rollout.temperature=0.0 is out of range",
    ("algorithm.responses_per_prompt=0",): "algorithm.responses_per_prompt=0 is out of range",
    ("algorithm.clip_low=1.1",): "set it to a number above 0 and at most 1",
    ("algorithm.dual_clip=1",): "algorithm.dual_clip=1.0 is out of range: set it to a number above",
    ("algorithm.dual_clip=1.1",): "algorithm.dual_clip=1.1 is below 1 + algorithm.clip_high=1.2",
    (
        "algorithm.policy_loss=cispo",
        "algorithm.dual_clip=3",
    ): "algorithm.dual_clip=3.0 bounds a loss, but algorithm.policy_loss=cispo bounds weights",
    ("algorithm.policy_loss=sapo", "algorithm.dual_clip=3"): "sapo has a smooth gate: set",
    (
        "algorithm.name=dpo",
    ): "data.rejected_key=null with algorithm.name=dpo: dpo compares responses",
    (
        "data.rejected_key=bad",
    ): "data.rejected_key=bad with algorithm.name=grpo: dpo compares respon",
    (*DPO, "algorithm.beta=0"): "algorithm.beta=0.0 is out of range: set it to a number above 0",
    (*DPO, "algorithm.label_smoothing=0.5"): "set it to a number at least 0 and below 0.5",
    (
        *DPO,
        "algorithm.loss_type=ipo",
        "algorithm.label_smoothing=0.1",
    ): "algorithm.label_smoothing=0.1 is for losses of type sigmoid, sigmoid_norm and robust, but",
    (
        *DPO,
        "algorithm.loss_type=robust",
    ): "algorithm.loss_type=robust with algorithm.label_smoothing=0 is sigmoid: set label_smooth",
    (
        *DPO,
        "algorithm.loss_type=kto",
    ): "algorithm.loss_type=",
    (*DPO, "algorithm.epochs=2"): "unknown key algorithm.epochs",
    (TEACHER, SFT): "distillation.teachers scores what the policy samples, but algorithm.name=sft",
    (
        TEACHER,
        "rollout.temperature=0.7",
    ): "scores at temperature 1, but rollout.temperature=0.7: set it",
    (
        TEACHER,
        FORWARD,
    ): "is over the teacher's likeliest tokens, but distillation.top_k=0: set it to",
    (
        "distillation.top_k=8",
    ): "distillation.top_k=8 has no effect with distillation.divergence=sam",
    (
        TEACHER,
        FORWARD,
        "distillation.top_k=8",
        "rollout.top_p=0.9",
        "rollout.top_k=100",
    ): "but rollout.top_p=0.9 and rollout.top_k=100 give some 0, where it is infinite: set them to",
    (
        TEACHER,
        "data.video_key=videos",
    ): "is sent no videos, but data.video_key=videos: set it to null",
    (
        TEACHER.replace("http://", ""),
    ): "distillation.teachers.large.urls has 'node:30000', but that is not a URL: writ",
    (
        TEACHER,
        "distillation.teachers.large.weight=0",
    ): "distillation.teachers.large.weight=0.0 must be a number above 0",
    (
        "distillation.teachers.x.weight=1",
    ): "distillation.teachers.x has no urls, so that it is the policy itself, which learns nothing",
    (
        TEACHER,
        TEACHER.replace("large", "small"),
    ): "distillation.teachers.small and distillation.teachers.large both have no rows, but a row h",
    (
        TEACHER,
        TEACHER.replace("large", "small"),
        "distillation.teachers.large.rows=[count,colour]",
        "distillation.teachers.small.rows=[compare,count]",
    ): "distillation.teachers.small and distillation.teachers.large both have the rows 'count', b",
    (
        TEACHER,
        "distillation.teachers.large.rows=[count]",
        "data.category_key=null",
    ): "distillation.teachers.large.rows are values of data.category_key, which is null: set it",
    (
        SELF.replace("answer", "feedback"),
    ): "hint has the column 'feedback', but it may only have those of answer: add it to data.ext",
    (SELF.replace("}", ""),): "does not name its columns (expected '}' before end of string): wr",
    (
        SELF,
        "rollout.max_staleness=1",
    ): "distillation.teachers.itself is the policy itself with the weights that sampled, but rollo",
    ("distillation.kl_estimator=k1",): "distillation.kl_estimator=",
    ("algorithm.policy_loss=gspo",): "set algorithm.loss_aggregation=sequence_mean",
    (
        "algorithm.kl_estimator=k1",
    ): "algorithm.kl_estimator=k1 has a gradient that is zero on avera",
    (
        "algorithm.kl_estimator=unbiased",
        "algorithm.kl_in=reward",
    ): "algorithm.kl_estimator=unbiased is about the gradient, but with algorithm.kl_in=reward",
    (
        "algorithm.kl_target=0.1",
        "algorithm.kl_coefficient=0",
    ): "algorithm.kl_target=0.1 scales algorithm.kl_coefficient, but 0 stays 0",
    ("algorithm.old_logprobs=rollout",): "algorithm.importance compares the trainer's log-probs wi",
    (
        "algorithm.old_logprobs=rollout",
        "algorithm.importance=none",
        "algorithm.reject_above=1.1",
    ): "algorithm.reject_below, reject_above compares the trainer's log-probs with the rollout's",
    (
        "algorithm.importance=none",
        "algorithm.importance_floor=0.5",
    ): "algorithm.importance_floor=0.5 has nothing to mask",
    (
        "rollout.max_staleness=1",
        "algorithm.importance=none",
    ): "for which algorithm.importance=none does not correct",
    (
        "rollout.max_staleness=1",
        "rollout.oversample=2.5",
    ): "rollout.oversample=2.5 starts the prompts of more steps than the 2 that rollout.max_st",
    (
        "rollout.max_staleness=1",
        "lora.rank=4",
        "rollout.lora=adapter",
    ): "rollout.lora=adapter unloads the adapter",
    (
        "rollout.max_staleness=1",
        "rollout.mode=external",
        "rollout.urls=[http://a:1]",
        "rollout.router=http://b:1",
        "rollout.suppress_special_tokens=false",
    ): "rollout.router=http://b:1 hides them",
    (
        "rollout.streaming=true",
        "rollout.colocate=true",
    ): "rollout.streaming=true trains while the servers generate, but rollout.colocate=true",
    (
        "rollout.streaming=true",
        "rollout.mode=external",
        "rollout.urls=[http://a:1]",
        "rollout.router=http://b:1",
        "rollout.suppress_special_tokens=false",
    ): "rollout.streaming=true sends requests to servers that have taken the last push",
    ("algorithm.reject_above=0.9",): "algorithm.reject_above=0.9 is out of range",
    (
        "algorithm.overlong_buffer=5",
    ): "algorithm.overlong_buffer=5 is above rollout.max_new_tokens=4",
    (
        "algorithm.overlong_buffer=2",
        "algorithm.mask_truncated=true",
    ): "algorithm.overlong_buffer=2 punishes what algorithm.mask_truncated=true leaves out",
    (
        "algorithm.name=ppo",
        "algorithm.responses_per_prompt=1",
        "algorithm.dynamic_sampling=3",
    ): "algorithm.dynamic_sampling=3 compares the responses to a prompt",
    (
        "algorithm.advantage_estimator=rloo",
        "algorithm.normalize_by_std=false",
    ): "algorithm.normalize_by_std=false is about algorithm.advantage_estimator=grpo, but it is rl",
    (
        "algorithm.name=ppo",
        "algorithm.critic_warmup_steps=40",
    ): "algorithm.critic_warmup_steps=40 is not below algorithm.steps=40",
    ("parallel.sequence=true",): "parallel.sequence=true splits",
    ("parallel.context=0",): "parallel.context=0 is out of range",
    ("parallel.virtual=2",): "parallel.virtual=2 is about pipeline stages, but parallel.pipeline=1",
    ("parallel.first_stage_layers=1",): "parallel.first_stage_layers=1 is about pipeline stages",
    ("parallel.last_stage_layers=9",): "parallel.last_stage_layers=9 is about pipeline stages",
    (
        "parallel.tensor=2",
        "parallel.data=3",
        "parallel.expert=4",
    ): "parallel.expert=4 x parallel.expert_tensor=1 x parallel.pipeline=1 does not divide",
    (
        "parallel.pipeline=2",
        "parallel.data=2",
        "parallel.expert_tensor=4",
    ): "parallel.expert_tensor=4 x parallel.pipeline=2 does not divide the world size 4",
    ("model.attention=flash",): "model.attention=flash does not compute in model.dtype=float32",
    ("model.attention=transformer_engine",): "set model.dtype=bfloat16, or model.attention to sdpa",
    (
        "recompute.language=selective",
        "recompute.modules=[mlp, norms]",
    ): "recompute.modules names norms, but it cannot be recomputed: choose from core_attn, m",
    ("recompute.layers=0",): "recompute.layers=0 is out of range",
    ("lora.rank=-1",): "lora.rank=-1 is out of range",
    ("lora.rank=4", "lora.alpha=0"): "lora.alpha=0.0 is out of range",
    ("lora.rank=4", "lora.dropout=1"): "lora.dropout=1.0 is out of range",
    (
        "lora.rank=4",
        "model.freeze_tower=false",
    ): "lora.rank=4 trains only adapters, so the tower cannot be trained itself",
    ("lora.rank=4", "model.freeze_merger=false"): "set model.freeze_tower=true and model.freeze_me",
    ("lora.rank=4", "lora.targets=[]"): "lora.targets=[] leaves nothing to train with lora.rank=4",
    (
        "lora.rank=4",
        "lora.targets=[language.mlp, q_proj]",
    ): "lora.targets holds 'q_proj': choose from language.attention, language.l",
    (
        "lora.rank=4",
        "lora.dropout=0.1",
        "lora.targets=[vision.mlp]",
        "recompute.tower=true",
    ): "lora.dropout=0.1 with adapters in the tower needs recompute.tower=false",
    ("data.min_pixels=9", "data.max_pixels=8"): "data.min_pixels=9 is above data.max_pixels=8",
    ("data.pack_tokens=1023",): "data.pack_tokens=1023 cannot hold a prompt",
    (
        "data.pack_tokens=4096",
        "rollout.max_new_tokens=3073",
    ): "one response: data.max_prompt_tokens=1024 + rollout.max_new_tokens=3073 is 4097; set it to",
    (f"algorithm.steps={10**30}",): "set it to a number at least 1 and at most 1000000000",
    ("algorithm.minibatches=3",): "algorithm.minibatches=3 must divide",
    ("rollout.mode=external",): "rollout.mode=external needs the servers' addresses",
    ("rollout.lora=adapter",): "lora.rank=0 trains none",
    (
        "rollout.lora=adapter",
        "lora.rank=4",
        "lora.targets=[language.attention, vision.merger]",
    ): "cannot serve lora.targets=vision.merger",
    (
        "rollout.lora=adapter",
        "lora.rank=4",
        "lora.targets=[language.attention, language.linear_attention]",
    ): "cannot serve lora.targets=language.linear_attention",
    ("rollout.urls=[http://a:1]",): "would not be used with rollout.mode=managed",
    (
        "rollout.router=http://a:1",
    ): "rollout.router=http://a:1 would not be used with rollout.mode=managed",
    ("rollout.servers=0",): "rollout.servers=0 is out of range",
    ("rollout.oversample=0.5",): "rollout.oversample=0.5 is out of range: set it to a number at l",
    (
        "rollout.oversample=1.5",
    ): "rollout.oversample=1.5 starts the prompts of more steps than the 1 that rollout.max_st",
    (
        "rollout.mode=external",
        "rollout.urls=[http://a:1]",
        "rollout.router=http://b:1",
    ): "set rollout.suppress_special_tokens=false or rollout.router=null",
    ("rollout.min_servers=2",): "rollout.min_servers=2 is more than the 1 servers",
    (
        "rollout.mode=external",
        "rollout.urls=[http://a:1]",
        "rollout.min_servers=2",
    ): "rollout.min_servers=2 is more than the 1 servers",
    (
        "rollout.mode=external",
        "rollout.urls=[http://a:1, http://a:1/]",
    ): "names a server twice: remove one",
    ("rollout.port=65535", "rollout.servers=2"): "rollout.port=65535 is the first of rollout.serv",
    ("rollout.gpus=[4]", "rollout.servers=2"): "rollout.gpus=[4] must name 2 different GPUs",
    ("rollout.gpus=[4, 4]", "rollout.servers=2"): "rollout.gpus=[4, 4] must name 2 different GPUs",
    ("rollout.gpus=[4, 6]", "rollout.tensor_parallel=2"): "gives one server [4, 6], but a server",
    (
        "rollout.colocate=true",
        "rollout.sync=distributed",
    ): "rollout.sync=distributed needs a GPU for",
    ("rollout.server_args.nnodes=2",): "set by megavlm: use rollout.tensor_parallel",
    ("rollout.server_args.nccl-init-addr=a:1",): "set by megavlm: use rollout.tensor_parallel",
    ("rollout.server_args.base_gpu_id=4",): "set by megavlm: use rollout.gpus",
    ("rollout.server_args.enable_memory_saver=true",): "set by megavlm: use rollout.colocate",
    ("rollout.server_args.port=1",): "rollout.server_args.port is set by megavlm: use rollout.port",
    ("rollout.server_args.tp-size=2",): "use rollout.tensor_parallel",
    (
        "optimizer.tower_lr=1e-6",
    ): "optimizer.tower_lr=1e-06 is for a part that is trained, but model",
    ("optimizer.merger_lr=1e-6", "model.freeze_tower=false"): "optimizer.merger_lr=1e-06 is for a",
    (
        "rollout.server_args.quantization=fp8",
    ): "rollout.server_args.quantization is set by megavlm: use rollout.quantization",
    (
        "rollout.server_args.mm-feature-transport=cuda_ipc",
    ): "rollout.server_args.mm-feature-transport=cuda_ipc would give an image's GPU memory to",
    (
        "rollout.server_args.torchao_config=int8wo",
    ): "refused, because SGLang cannot load the weights",
    (
        "rollout.quantization=fp8",
        "model.dtype=float32",
    ): "rollout.quantization=fp8 quantises weights in bfloat16, the only form in",
    (
        "rollout.quantization=fp8",
        "model.dtype=bfloat16",
        "algorithm.importance=none",
    ): "rollout.quantization=fp8 samples from rounded weights, for which algorit",
    (
        "rollout.quantization=fp8",
        "model.dtype=bfloat16",
        "rollout.sync=disk",
    ): "rollout.quantization=fp8 needs megavlm's weight loader, but rollout.sync",
    (
        "rollout.quantization=fp8",
        "rollout.lora=adapter",
        "lora.rank=8",
    ): "rollout.quantization=fp8 does not go with rollout.lora=adapter",
    (
        "rollout.quantization=fp8",
        "rollout.server_args.load_format=auto",
    ): "rollout.server_args.load_format is set by megavlm with rollout.quantizat",
    (
        "rollout.quantization=fp8",
        "rollout.server_args.speculative_algorithm=NEXTN",
    ): "updates have none for a draft model, but rollout.server_args.speculative_algorithm=NEXTN",
    (
        "rollout.quantization=fp8",
        "rollout.server_args.moe_runner_backend=cutlass",
    ): "SGLang's Triton kernel stores them, but rollout.server_args.moe_runner_b",
    ("speculation.train=true",): "but they draft none with it: set rollout.server_args.speculative",
    (
        "rollout.server_args.speculative_algorithm=EAGLE3",
        "rollout.server_args.speculative_draft_model_path=head",
        "rollout.sync=disk",
    ): "rollout.sync=disk: SGLang's loader would look for the policy's weights in the draft model",
    (
        "speculation.train=true",
        "rollout.server_args.speculative_algorithm=EAGLE3",
    ): "with it: set rollout.server_args.speculative_algorithm=NEXTN (Qwen3.5), or EAGLE3 with",
    (
        "speculation.train=true",
        "rollout.server_args.speculative_algorithm=NEXTN",
        "rollout.lora=adapter",
        "lora.rank=8",
    ): "speculation.train=true sends the draft head in each weight update, but rollout.lora=adapt",
    (
        "rollout.sync_delta=true",
        "rollout.sync=disk",
    ): "rollout.sync_delta=true needs megavlm's weight",
    (
        "rollout.sync_delta=true",
        "rollout.lora=adapter",
        "lora.rank=8",
    ): "rollout.sync_delta=true has no use with rollout.lora=adapter",
    (
        "rollout.sync_delta=true",
        "rollout.colocate=true",
        "rollout.sync=tensor",
    ): "rollout.sync_delta=true needs servers that keep their weights",
    ("rollout.sync=store",): "rollout.mode=managed: set it to external, or choose another",
    (
        "rollout.sync=store",
        "rollout.mode=external",
        "rollout.urls=[http://a:1]",
        "rollout.lora=adapter",
        "lora.rank=8",
    ): "rollout.lora=adapter: set it to merged, or choose another",
    (
        "rollout.sync=store",
        "rollout.mode=external",
        "rollout.urls=[http://a:1]",
        "rollout.sync_delta=true",
    ): "rollout.sync_delta=true has no use with rollout.sync=store",
    ("rollout.store=s3://b/run",): "rollout.store=s3://b/run is only used with rollout.sync=store",
    ("rollout.server_args.trust-remote-code=true",): "refused, because it runs code",
    (
        "rollout.server_args.speculative-accept-threshold-acc=0.9",
    ): "is refused, because servers would sample tokens from another distribution",
    ("rollout.server_args.api_key=secret",): "rollout.server_args.api_key is refused",
    ("rollout.server_args={--device: cpu}",): "rollout.server_args.--device is set by megavlm",
    ("optimizer.min_lr=1",): "optimizer.min_lr=1.0 is above optimizer.lr=1e-06",
    ("optimizer.warmup_steps=41",): "optimizer.warmup_steps=41 is above algorithm.steps=40",
    (
        "algorithm.name=ppo",
        "algorithm.critic_warmup_steps=10",
        "optimizer.warmup_steps=31",
    ): "is above algorithm.steps=40 less algorithm.critic_warmup_steps=10: the rate would never",
    (
        "algorithm.routing_replay=true",
        "rollout.mode=external",
        "rollout.urls=[http://a:1]",
        "rollout.router=http://b:1",
        "rollout.suppress_special_tokens=false",
    ): "rollout.router=http://b:1 passes on only the keys that it knows: set the first to false",
    ("rollout.top_p=0",): "rollout.top_p=0.0 is out of range: set it to a number above 0",
    ("rollout.top_p=0.9",): "rollout.top_k=0: set it to 2 to 4096",
    ("rollout.top_k=1",): "rollout.top_k=1 has servers return the tokens that they keep",
    ("rollout.top_k=5000",): "rollout.top_k=5000: set it to 2 to 4096",
    (
        "rollout.top_p=0.9",
        "rollout.top_k=50",
        "rollout.server_args.speculative_algorithm=NEXTN",
    ): "rollout.top_p=0.9 needs the tokens that servers keep, and SGLang does not return them with",
    (
        "rollout.top_k=50",
        "rollout.mode=external",
        "rollout.urls=[http://a:1]",
        "rollout.router=http://b:1",
        "rollout.suppress_special_tokens=false",
    ): "rollout.top_k=50 asks servers for the tokens that they keep, but rollout.router=http://b:1",
    ("evaluation.every=1",): "evaluation.every=1 needs questions to evaluate on",
    ("evaluation.after=true",): "evaluation.after=true needs questions to evaluate on",
    ("checkpoint.verify_export=true",): "has nothing to verify with checkpoint.export_hf=false",
    ("checkpoint.keep_last=0",): "checkpoint.keep_last=0 is out of range: set it to a number at l",
    ("checkpoint.keep_every=0", *KEEP): "checkpoint.keep_every=0 is out of range",
    ("checkpoint.step=-1",): "checkpoint.step=-1 is out of range",
    ("checkpoint.best_mode=highest",): "has the wrong type: it must be one of max, min",
    ("checkpoint.async=true",): "unknown key checkpoint.async: did you mean checkpoint.async_save?",
    ("checkpoint.step=4", "run.resume=never"): "but run.resume=never resumes from none: remove one",
    (
        "checkpoint.every=10",
        "checkpoint.keep_every=20",
        "checkpoint.keep_last=null",
    ): "checkpoint.keep_last=null deletes none: set checkpoint.keep_last, or remove it",
    (
        *KEEP,
        "checkpoint.keep_every=25",
    ): "checkpoint.keep_every=25 must be a multiple of checkpoint.every=10",
    (
        "checkpoint.keep_last=1",
        "checkpoint.keep_every=5",
    ): "checkpoint.keep_every=5 must be a multiple of checkpoint.every=20",
    (
        "checkpoint.best_metric=rewards",
    ): "checkpoint.best_metric=rewards is not a metric of training steps: choose one of",
    ("checkpoint.best_metric=evaluation/loss",): "choose one of evaluation/greedy, evaluation/samp",
    (
        "checkpoint.best_metric=evaluation/shuffled/count",
        FILES,
        "evaluation.every=5",
        "evaluation.shuffled=false",
    ): "is not measured with evaluation.shuffled=false",
    ("run.profile=[3,50]", "algorithm.steps=40"): "run.profile=[3, 50] has a step that never comes",
    (*GREEDY,): "checkpoint.best_metric=evaluation/greedy needs evaluations of saved steps",
    (*GREEDY, "evaluation.before=true"): "set evaluation.every to checkpoint.every",
}

KEPT = [
    ("rollout.quantization=fp8", "model.dtype=bfloat16"),
    (
        "rollout.quantization=fp8",
        "model.dtype=bfloat16",
        "algorithm.importance=none",
        "algorithm.old_logprobs=rollout",
    ),
    ("parallel.sequence=true", "parallel.tensor=2"),
    ("parallel.pipeline=2", "parallel.virtual=2", "parallel.first_stage_layers=1"),
    ("parallel.pipeline=2", "parallel.expert=2", "parallel.data=2"),
    ("parallel.tensor=2", "parallel.data=2", "parallel.expert=2", "parallel.expert_tensor=2"),
    ("model.attention=flash", "model.dtype=bfloat16"),
    ("model.attention=flex",),
    ("recompute.language=selective", "recompute.modules=[mlp, moe, core_attn]"),
    ("lora.rank=4", "lora.dropout=0.1", "recompute.tower=true"),
    ("lora.rank=4", "lora.targets=[vision.merger, 'language_model.decoder.layers.0.mlp.*']"),
    ("lora.targets=[]", "model.freeze_tower=false"),  # without a rank there are no adapters
    ("data.video_key=videos", "evaluation.after=true", FILES),
    ("data.min_pixels=8", "data.max_pixels=8"),
    ("rollout.max_new_tokens=3072", "data.pack_tokens=4096"),
    ("algorithm.minibatches=8", "parallel.data=16"),
    ("algorithm.clip_low=1", "algorithm.policy_loss=cispo"),
    ("algorithm.policy_loss=gspo", "algorithm.loss_aggregation=sequence_mean"),
    ("algorithm.kl_estimator=k1", "algorithm.kl_in=reward", "algorithm.kl_target=0.1"),
    ("algorithm.kl_estimator=k1", "algorithm.kl_coefficient=0"),
    ("algorithm.importance_floor=0.5",),
    ("algorithm.old_logprobs=rollout", "algorithm.importance=none"),
    (
        "algorithm.responses_per_prompt=1",
        "algorithm.advantage_estimator=reinforce_plus_plus",
    ),
    ("algorithm.name=ppo", "algorithm.responses_per_prompt=1", "algorithm.critic=shared"),
    ("algorithm.name=ppo", "algorithm.critic_warmup_steps=39", "algorithm.value_clip=null"),
    (SFT, "parallel.data=32", "rollout.max_new_tokens=4000"),
    ("rollout.mode=external", "rollout.urls=[http://a:1, https://b.c:65000/]"),
    ("rollout.server_args.mem_fraction_static=0.5",),
    ("rollout.port=65534", "rollout.servers=2", "rollout.min_servers=2"),
    ("rollout.gpus=[6, 7, 4, 5]", "rollout.servers=2", "rollout.tensor_parallel=2"),
    (
        "rollout.mode=external",
        "rollout.urls=[http://a:1]",
        "rollout.router=http://b:1",
        "rollout.suppress_special_tokens=false",
    ),
    ("rollout.colocate=true", "rollout.max_staleness=1", "rollout.oversample=1.5"),
    (
        "rollout.colocate=true",
        "rollout.max_staleness=1",
        "lora.rank=4",
        "rollout.lora=adapter",
        "rollout.suppress_special_tokens=false",
    ),
    ("rollout.streaming=true", "rollout.max_staleness=2", "rollout.oversample=2.5"),
    ("rollout.max_staleness=2", "rollout.pause_mode=retract"),
    (SFT, "rollout.max_staleness=1", "rollout.colocate=true"),
    (SFT, "rollout.streaming=true", "rollout.colocate=true"),
    ("rollout.streaming=true", "rollout.max_staleness=1"),
    ("rollout.streaming=true", "lora.rank=4", "rollout.lora=adapter"),
    ("evaluation.every=1", "evaluation.before=true", FILES),
    ("optimizer.warmup_steps=40", "optimizer.min_lr=1e-6"),
    ("optimizer.clip_grad=0",),
    ("checkpoint.verify_export=true", "checkpoint.export_hf=true"),
    (*KEEP, "checkpoint.keep_every=20", *GREEDY, "evaluation.every=10"),
    (*GREEDY, "evaluation.after=true"),
    ("checkpoint.best_metric=reward/part/a",),
    ("checkpoint.best_metric=loss", "checkpoint.best_mode=min", "checkpoint.keep_last=1"),
    ("checkpoint.step=0", "checkpoint.async_save=false"),
]


def test_the_attention_kernels_are_those_of_the_models() -> None:
    from megavlm.models.common.attention_backends import BACKENDS

    names = set(get_args(get_type_hints(Model)["attention"]))
    assert names == {"auto", *BACKENDS}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(BASE))
    return path


@pytest.mark.parametrize("overrides", BROKEN, ids=" ".join)
def test_a_broken_rule_is_one_sentence(recipe: Path, overrides: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        load(recipe, overrides)
    assert BROKEN[overrides] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("overrides", KEPT, ids=" ".join)
def test_what_a_rule_allows(recipe: Path, overrides: tuple[str, ...]) -> None:
    assert isinstance(load(recipe, overrides), Config)


@pytest.mark.parametrize(
    "url",
    [
        "a:1",
        "http://a",
        "ftp://a:1",
        "http://a:x",
        "http://a:1/path",
        "http://a:1?k=v",
        "http://[:1",
    ],
)
def test_a_url_is_scheme_host_and_port(recipe: Path, url: str) -> None:
    with pytest.raises(ValueError, match="that is not a server's address: write http://HOST:PORT"):
        load(recipe, ["rollout.mode=external", f"rollout.urls=['{url}']"])


def test_a_url_holds_no_password_and_the_message_does_not_either(recipe: Path) -> None:
    with pytest.raises(ValueError, match="user name or password for host") as caught:
        load(recipe, ["rollout.mode=external", "rollout.urls=['http://me:hunter2@host:1']"])
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("port", "3"),
        ("servers", "2"),
        ("gpus", "[1]"),
        ("colocate", "true"),
    ],
)
def test_external_servers_are_not_configured(recipe: Path, key: str, value: str) -> None:
    external = ["rollout.mode=external", "rollout.urls=['http://a:1']"]
    with pytest.raises(ValueError, match=r"rollout\.mode=external starts none"):
        load(recipe, [*external, f"rollout.{key}={value}"])


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        ([], 1),
        (["parallel.tensor=2", "parallel.pipeline=3", "parallel.context=2"], 12),
        (["parallel.tensor=2", "parallel.data=3"], 6),
        (["parallel.expert=4"], 4),  # the data axis grows until experts divide it
        (["parallel.tensor=2", "parallel.expert=3"], 6),
        (["parallel.pipeline=2", "parallel.expert=2", "parallel.context=2"], 4),
    ],
)
def test_a_run_has_as_many_ranks_as_its_axes_make(
    recipe: Path, overrides: list[str], ranks: int
) -> None:
    assert load(recipe, overrides).parallel.num_ranks == ranks


def test_the_names_of_metrics_are_those_that_the_reference_explains() -> None:
    written = [name for name in entries() if name not in ("step", "time")]
    assert [name for name in written if nearest_metrics(name)] == []
    assert unexplained({*SUPERVISED, *POLICY, *CRITIC}) == set()


def test_the_measures_are_those_of_an_evaluation() -> None:
    from megavlm.evaluation.result import EvaluationResult

    assert [item.name for item in fields(EvaluationResult)] == [*MEASURES, "seconds", "failures"]
