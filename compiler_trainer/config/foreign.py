"""Answers to option names of other trainers, shown when such a name is refused.

The names are those of transformers' TrainingArguments, trl, peft, torchtitan, Megatron-LM, Lightning, axolotl and
accelerate. An answer is a full sentence: it names the option and a value, or says that there is none and what there is
instead.
"""

from __future__ import annotations

ACCUMULATION = "gradient accumulation is train.microbatches: parts of train.global_batch_size, or auto"
ROWS = "train.global_batch_size is the sequences of a step over all ranks; train.microbatches computes them in parts"
MIXED = "mixed precision is passes.cast.param_dtype=bfloat16 over float32 master weights (train.dtype)"
NO_FP16 = "there is no fp16, which needs loss scaling; use passes.cast.param_dtype=bfloat16"
NO_BLOCKS = "there is no MXFP8 and no NVFP4; float8 is passes.cast.float8=rowwise or tensorwise"
QUANTIZED = "weights under LoRA are stored in few bits by recipe=qlora, or model.quantize={}"
NO_GROUPED = (
    "matmuls of experts are not computed in float8; passes.cast.float8=rowwise or tensorwise is for linear layers"
)
LENGTH = "the length of a run is train.steps: a number of steps, or epochs as in train.steps=3epochs"
LOGGERS = "metrics go to metrics.jsonl, TensorBoard and run.loggers=[{_target_: compiler_trainer.WandB}], or MLflow"
CALLBACKS = "callbacks are train.callbacks=[{_target_: my_package.Callback}] (docs/guides/your-loop.md)"
PREFERENCES = (
    "losses of preference pairs are recipe=dpo, orpo or simpo, and loss=dpo, ipo, simpo, orpo, cpo or kto with "
    "data.pairs=true data.chat=true"
)
GRPO = "reinforcement learning is recipe=grpo data.prompts=[prompts.jsonl] rewards=[my.rewards.correct]"
ROLLOUTS = "answers are drawn for loss.steps_per_rollout steps at once, with loss=grpo; each is used in one step"
NLL_WEIGHT = "the weight of the negative log-likelihood of chosen answers is loss.nll_weight, with a loss of pairs"
EMA = "an average of the weights (EMA) is train.ema=0.999"
CHECKPOINTING = "activation checkpointing is passes.remat.policy=none|selective|attention|full, or a budget"
SHARDING = "parameters are sharded over mesh.dp_shard (FSDP, ZeRO-3; ZeRO-2 with passes.remat.regather=false)"
ATTENTION = "kernels are chosen automatically: the model's calls of SDPA and FlexAttention stay as they are"
DATA = "text and conversations are data=text data.files=[...]; a dataset on the hub is data=hf_dataset data.path=NAME"
FORMATS = "data.chat=true reads OpenAI messages, ShareGPT, Alpaca, prompts with completions; fields tell the format"
MODEL = "model=hf model.path=FOLDER loads what transformers saved, model.path=ORGANIZATION/NAME a model on the hub"
LORA = "LoRA goes with model=hf: model.lora.rank, alpha, dropout and targets, or recipe=lora"
STOPPING = "early stopping is eval.patience=3: evaluations without a lower loss; checkpoint.keep_best keeps the best"
EVALUATION = "validation loss is computed every eval.interval steps over eval.batches batches"
VALIDATION = (
    "validation data are data.validation=[{files: [...]}], or the share data.eval_fraction of the training documents"
)
PIPELINE = "pipeline parallelism is mesh.pp, with at least as many train.microbatches (docs/guides/pipeline.md)"
REPLICAS = "data parallelism is mesh.dp_shard (sharded, FSDP) and mesh.dp_replicate (replicated, DDP)"
DEVICE = "a GPU is used if there is one; CUDA_VISIBLE_DEVICES says which, and none if it is empty"
BUILT = "torch.compile is not called: lower.backend=inductor compiles each job, lower.backend=eager none"

ANSWERS = {
    # batch and accumulation
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_accumulation": ACCUMULATION,
    "accumulate_grad_batches": ACCUMULATION,
    "accumulation": ACCUMULATION,
    "micro_batch_size": ROWS,
    "microbatch_size": ROWS,
    "per_device_train_batch_size": ROWS,
    "per_device_batch_size": ROWS,
    "local_batch_size": ROWS,
    "train_batch_size": ROWS,
    "batch_size": ROWS,
    "per_device_eval_batch_size": "evaluation uses the batch size of training: train.global_batch_size",
    # precision
    "bf16": MIXED,
    "bfloat16": MIXED,
    "precision": MIXED,
    "mixed_precision": MIXED,
    "mixed_precision_param": MIXED,
    "autocast": MIXED,
    "amp": MIXED,
    "torch_dtype": MIXED,
    "fp16": NO_FP16,
    "float16": NO_FP16,
    "half": NO_FP16,
    "tf32": "call torch.set_float32_matmul_precision for TF32, or use passes.cast.param_dtype=bfloat16",
    "fp8": "float8 is passes.cast.float8=rowwise or tensorwise",
    "mxfp8": NO_BLOCKS,
    "nvfp4": NO_BLOCKS,
    "float8_grouped_mm": NO_GROUPED,
    "fp8_grouped_mm": NO_GROUPED,
    "moe_fp8": NO_GROUPED,
    "load_in_8bit": QUANTIZED.format("int8"),
    "load_in_4bit": QUANTIZED.format("nf4"),
    # length and schedule
    "epochs": LENGTH,
    "num_train_epochs": LENGTH,
    "num_epochs": LENGTH,
    "max_epochs": LENGTH,
    "max_steps": "the number of steps is train.steps",
    "num_steps": "the number of steps is train.steps",
    "train_iters": "the number of steps is train.steps",
    "max_iters": "the number of steps is train.steps",
    "lr": "the learning rate is optim.lr",
    "learning_rate": "the learning rate is optim.lr",
    "lr_scheduler": "the schedule is lr_schedule=cosine|linear|wsd|constant",
    "lr_scheduler_type": "the schedule is lr_schedule=cosine|linear|wsd|constant",
    "lr_decay_style": "the schedule is lr_schedule=cosine|linear|wsd|constant",
    "min_lr": "the schedule ends at lr_schedule.min_ratio times optim.lr",
    "warmup": "linear warm-up is lr_schedule.warmup_steps",
    "warmup_ratio": "linear warm-up is lr_schedule.warmup_steps",
    "warmup_iters": "linear warm-up is lr_schedule.warmup_steps",
    "weight_decay": "weight decay is optim.weight_decay",
    "adam_beta1": "AdamW's betas are optim.betas=[0.9,0.95]",
    "adam_beta2": "AdamW's betas are optim.betas=[0.9,0.95]",
    "adam_epsilon": "AdamW's epsilon is optim.eps",
    "max_grad_norm": "gradients are clipped to a norm of optim.max_norm",
    "clip_grad": "gradients are clipped to a norm of optim.max_norm",
    "gradient_clip_val": "gradients are clipped to a norm of optim.max_norm",
    "optimizer": "the optimizer is optim=adamw|adamw8bit|adamwfp8|muon|sgd|custom",
    "early_stopping_patience": STOPPING,
    "early_stopping": STOPPING,
    "load_best_model_at_end": "checkpoint.keep_best=1 keeps the best checkpoint next to the latest",
    # memory
    "gradient_checkpointing": CHECKPOINTING,
    "activation_checkpointing": CHECKPOINTING,
    "activation_checkpoint": CHECKPOINTING,
    "recompute_granularity": CHECKPOINTING,
    "remat": CHECKPOINTING,
    "cpu_offload": "activations go to host memory with passes.remat.policy=offload",
    # ranks
    "fsdp": SHARDING,
    "fsdp_config": SHARDING,
    "deepspeed": SHARDING,
    "zero_stage": SHARDING,
    "zero": SHARDING,
    "ddp": "parameters are replicated over mesh.dp_replicate",
    "data_parallel_size": REPLICAS,
    "data_parallel_shard_degree": "sharded data parallelism is mesh.dp_shard",
    "data_parallel_replicate_degree": "replicated data parallelism is mesh.dp_replicate",
    "tensor_parallel_size": "tensor parallelism is mesh.tp",
    "tensor_parallel_degree": "tensor parallelism is mesh.tp",
    "tensor_model_parallel_size": "tensor parallelism is mesh.tp",
    "context_parallel_size": "context parallelism is mesh.cp",
    "context_parallel_degree": "context parallelism is mesh.cp",
    "sequence_parallel": "sequence parallelism comes with mesh.tp, unless passes.shard.sequence_parallel=false",
    "expert_parallel_size": "expert parallelism is mesh.ep",
    "expert_parallel_degree": "expert parallelism is mesh.ep",
    "expert_model_parallel_size": "expert parallelism is mesh.ep",
    "pipeline_parallel_size": PIPELINE,
    "pipeline_parallel_degree": PIPELINE,
    "pipeline_model_parallel_size": PIPELINE,
    "pp_size": PIPELINE,
    "dp": REPLICAS,
    "dp_size": REPLICAS,
    "data_parallel": REPLICAS,
    "device": DEVICE,
    "no_cuda": DEVICE,
    "use_cpu": DEVICE,
    "devices": "torchrun --nproc-per-node N -m compiler_trainer starts N ranks; mesh divides the work among them",
    "num_gpus": "torchrun --nproc-per-node N -m compiler_trainer starts N ranks; cluster.gpus is for a plan or dry run",
    "strategy": "mesh says how ranks divide a model and its data; mesh=auto plans it",
    # sequences, model, data
    "context_length": "the sequence length is train.seq_len",
    "max_seq_length": "the sequence length is train.seq_len",
    "max_length": "the sequence length is train.seq_len",
    "sequence_len": "the sequence length is train.seq_len",
    "seq_length": "the sequence length is train.seq_len",
    "seq_len": "the sequence length is train.seq_len",
    "block_size": "the sequence length is train.seq_len",
    "attn_implementation": ATTENTION,
    "flash_attention": ATTENTION,
    "use_flash_attention_2": ATTENTION,
    "torch_compile": BUILT,
    "compile": BUILT,
    "model_name_or_path": MODEL,
    "base_model": MODEL,
    "pretrained_model_name_or_path": MODEL,
    "tokenizer": "the tokenizer is data.tokenizer=FOLDER/tokenizer.json; of model=hf it is the folder's",
    "tokenizer_name": "the tokenizer is data.tokenizer=FOLDER/tokenizer.json; of model=hf it is the folder's",
    "lora_r": LORA,
    "lora_rank": LORA,
    "lora_alpha": LORA,
    "lora_dropout": LORA,
    "lora_target_modules": LORA,
    "use_peft": LORA,
    "adapter": LORA,
    "lora": LORA,
    "qlora": QUANTIZED.format("nf4"),
    "dataset": DATA,
    "datasets": DATA,
    "dataset_name": DATA,
    "dataset_path": DATA,
    "train_file": DATA,
    "data_path": DATA,
    "validation_file": VALIDATION,
    "eval_dataset": VALIDATION,
    "val_set_size": VALIDATION,
    "packing": "documents are packed: joined and cut, or whole with data.packing=fit, the default for conversations",
    "streaming": "text is tokenized once into a cache on disk (data.cache) and read from there",
    "assistant_only_loss": "with data.chat=true only the assistant's answers count in the loss",
    "train_on_inputs": "with data.chat=true only the assistant's answers count in the loss",
    "mask_history": "with data.train_on=last only the last answer of a conversation counts in the loss",
    "dataset_format": FORMATS,
    "chat_format": FORMATS,
    "formatting": FORMATS,
    "num_workers": "a thread prepares the next batch; all cores tokenize text",
    "dataloader_num_workers": "a thread prepares the next batch; all cores tokenize text",
    # what is written
    "eval_steps": EVALUATION,
    "eval_interval": EVALUATION,
    "eval_strategy": EVALUATION,
    "evaluation_strategy": EVALUATION,
    "save_steps": "a checkpoint is written every checkpoint.interval steps",
    "save_interval": "a checkpoint is written every checkpoint.interval steps",
    "save_strategy": "a checkpoint is written every checkpoint.interval steps",
    "enabled": "null turns it off: checkpoint.interval=null, eval.interval=null, passes.segment.max_nodes=null",
    "save_total_limit": "the newest checkpoint.keep checkpoints are kept",
    "output_dir": "the run folder is run.dir",
    "resume_from_checkpoint": "resume with: compiler-trainer resume RUN, or checkpoint.resume=latest|auto|PATH",
    "logging_steps": "each step is in metrics.jsonl; the screen shows ten lines of a run, or one that is updated",
    "log_interval": "each step is in metrics.jsonl; the screen shows ten lines of a run, or one that is updated",
    "wandb": LOGGERS,
    "report_to": LOGGERS,
    "logger": LOGGERS,
    "mlflow": LOGGERS,
    "comet": LOGGERS,
    "trackio": LOGGERS,
    "profile": "run.profile=true writes a trace of three steps, for Perfetto",
    "profiler": "run.profile=true writes a trace of three steps, for Perfetto",
    "callback": CALLBACKS,
    "callbacks": CALLBACKS,
    "ema_decay": EMA,
    "use_ema": EMA,
    "push_to_hub": "there is none: compiler-trainer export RUN FOLDER writes a folder for `hf upload`",
    "hub_model_id": MODEL,
    "seed": "the seed is train.seed; data.seed is the seed of the order of data",
    **dict.fromkeys(("dpo", "ipo", "simpo", "orpo", "cpo", "kto"), PREFERENCES),
    **dict.fromkeys(("cpo_alpha", "rpo_alpha"), NLL_WEIGHT),
    "simpo_gamma": "the target of the margin is loss.gamma, with loss=simpo",
    "ref_model": "the reference is the weights that training starts from; its log-probabilities are computed once",
    **dict.fromkeys(("grpo", "dapo", "gspo", "dr_grpo", "rloo", "rlvr"), GRPO),
    **dict.fromkeys(("reward_funcs", "reward_functions"), GRPO),
    **dict.fromkeys(("rlhf", "ppo"), f"there is no PPO with a value model; {GRPO}"),
    "num_generations": "the number of answers to a prompt is loss.group_size, with loss=grpo",
    "max_completion_length": "the longest answer is loss.answer_tokens, with loss=grpo",
    **dict.fromkeys(("steps_per_generation", "num_iterations"), ROLLOUTS),
    **dict.fromkeys(("use_vllm", "vllm_mode"), "answers are drawn by transformers' generate in the same process"),
    "loss_type": f"{PREFERENCES}; a loss of your own is loss._target_=package.function",
}
VALUES = {  # option -> hint for a value that is not one of its choices
    "passes.cast.float8": NO_BLOCKS,
    "passes.moe.dispatch": "counts of rows stay on the device, so buffer sizes cannot depend on them",
    "train.dtype": "it is the dtype of master weights; mixed precision is passes.cast.param_dtype=bfloat16 over "
    "float32 ones",
}


def answer(name: str) -> str | None:
    """Return the answer for another trainer's option, whatever its group; None if the name is unknown."""
    return ANSWERS.get(name.rpartition(".")[2].lower().replace("-", "_"))
