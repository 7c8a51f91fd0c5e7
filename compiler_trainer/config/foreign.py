"""Answers to option names of other trainers, shown when such a name is refused.

The names are those of transformers' TrainingArguments, trl, peft, torchtitan, Megatron-LM, Lightning, axolotl and
accelerate. An answer is a full sentence: it names the option and a value, or says that there is none and what there is
instead.
"""

from __future__ import annotations

import difflib

ACCUMULATION = "gradient accumulation is train.microbatches: parts of train.global_batch_size, or auto"
ROWS = "train.global_batch_size is the sequences of a step over all ranks; train.microbatches computes them in parts"
PER_RANK = (
    "train.batch_per_rank is the sequences of a rank in a microbatch; those of a step are train.global_batch_size, "
    "over all ranks"
)
MIXED = "mixed precision is train.precision=bf16: compute in bfloat16 over float32 master weights (train.dtype)"
NO_FP16 = "there is no fp16, which needs loss scaling; use train.precision=bf16"
NO_BLOCKS = (
    "matmuls are not computed in MXFP8 or NVFP4; float8 is passes.cast.float8=rowwise or tensorwise; weights under "
    "LoRA are stored with model.quantize=nvfp4 or mxfp4"
)
QUANTIZED = "weights under LoRA are stored in few bits by recipe=qlora, or model.quantize=nf4|int8|mxfp4|nvfp4"
NO_GROUPED = (
    "matmuls of experts are not computed in float8; passes.cast.float8=rowwise or tensorwise is for linear layers"
)
LENGTH = "the length of a run is train.steps: a number of steps, or epochs as in train.steps=3epochs"
LOGGERS = "metrics go to metrics.jsonl, TensorBoard and run.loggers=[wandb], or mlflow"
CALLBACKS = "callbacks are train.callbacks=[{_target_: my_package.Callback}] (docs/guides/your-loop.md)"
PREFERENCES = (
    "losses of preference pairs are recipe=dpo, orpo or simpo, and loss=dpo, ipo, simpo, orpo, cpo or kto with "
    "data.pairs=true data.chat=true"
)
GRPO = "reinforcement learning is recipe=grpo data.prompts=[prompts.jsonl] rewards=[my.rewards.correct]"
REWARDS = "a reward model of preference pairs (Bradley-Terry) is recipe=reward"
ROLLOUTS = "answers are drawn for loss.steps_per_rollout steps at once, with loss=grpo; each is used in one step"
NLL_WEIGHT = "the weight of the negative log-likelihood of chosen answers is loss.nll_weight, with a loss of pairs"
EMA = "an average of the weights (EMA) is train.ema=0.999"
CHECKPOINTING = "activation checkpointing is train.activation_checkpointing=none|selective|full|auto"
SHARDING = "parameters are sharded over mesh.dp_shard (FSDP, ZeRO-3; ZeRO-2 with passes.remat.regather=false)"
ATTENTION = "kernels are chosen automatically: the model's calls of SDPA and FlexAttention stay as they are"
DATA = "text and conversations are data=text data.files=[...]; a dataset on the hub is data=hf_dataset data.path=NAME"
FORMATS = "data.chat=true reads OpenAI messages, ShareGPT, Alpaca, prompts with completions; fields tell the format"
MODEL = "model=FOLDER loads what transformers saved, model=ORGANIZATION/NAME a model of the hub"
LORA = "LoRA goes with model=hf: model.lora.rank, alpha, dropout and targets, or recipe=lora or qlora"
STOPPING = "early stopping is eval.patience=3: evaluations without a lower loss; checkpoint.keep_best keeps the best"
EVALUATION = "validation loss is computed every eval.interval steps over eval.batches batches"
VALIDATION = (
    "validation data are data.validation=[{files: [...]}], or the share data.eval_fraction of the training documents"
)
PIPELINE = "pipeline parallelism is mesh.pp, with at least as many train.microbatches (docs/guides/pipeline.md)"
REPLICAS = "data parallelism is mesh.dp_shard (sharded, FSDP) and mesh.dp_replicate (replicated, DDP)"
DEVICE = "a GPU is used if there is one; CUDA_VISIBLE_DEVICES says which, and none if it is empty"
PACKING = "documents are packed: joined and cut, or whole with data.packing=fit, the default for conversations"
OWN_OPTIMIZER = "another optimizer is optim=custom optim._target_=package.Class (docs/guides/your-loop.md)"
JOB_FILE = "a job file is YAML and is given by itself: compiler-trainer job.yaml"
OTHER_GPU = (
    "its figures, for predictions, come from compiler-trainer calibrate --out FOLDER/cluster/NAME.yaml on such a "
    "machine, for --config-dir FOLDER cluster=NAME; training needs none"
)
SFT = "supervised fine-tuning (SFT) is recipe=finetune, with LoRA recipe=lora"
FROZEN = "a learning rate of 0 freezes weights: 'optim.groups={frozen:{names:[\"model.embed_tokens.*\"],lr:0}}'"
LIGER = "kernels come from Inductor; the loss is computed in chunks with passes.chunk_loss.chunks=8"
SIZES = "the sizes of a decoder are model.dim, model.n_layers, model.n_heads, model.ffn_dim and model.vocab_size"
RANKS = "ranks are started by compiler-trainer launch -n RANKS, or torchrun; mesh divides the work among them"
RESUME = "resume with: compiler-trainer resume RUN, or checkpoint.resume=latest|auto|PATH"
CONTEXT = "it is a config.json's, which model.path reads (docs/guides/long-sequences.md)"
BUILT = "torch.compile is not called: lower.backend=inductor compiles each job, lower.backend=eager none"

NAMES = {  # answer -> the names that it answers
    # batch and accumulation
    ACCUMULATION: "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches accumulation",
    PER_RANK: (
        "micro_batch_size microbatch_size per_device_train_batch_size per_device_batch_size local_batch_size"
    ),
    ROWS: "train_batch_size batch_size",
    "evaluation uses the batch size of training: train.global_batch_size": "per_device_eval_batch_size",
    # precision
    MIXED: "bf16 bfloat16 precision mixed_precision mixed_precision_param autocast amp torch_dtype",
    NO_FP16: "fp16 float16 half",
    "call torch.set_float32_matmul_precision for TF32, or use passes.cast.param_dtype=bfloat16": "tf32",
    "float8 is train.precision=fp8, or passes.cast.float8=rowwise|tensorwise": "float8 fp8",
    NO_BLOCKS: "mxfp8 nvfp4",
    NO_GROUPED: "float8_grouped_mm fp8_grouped_mm moe_fp8",
    QUANTIZED: "load_in_8bit load_in_4bit qlora quantize quantization bnb_4bit_quant_type",
    # length and schedule
    LENGTH: "epochs num_train_epochs num_epochs max_epochs",
    "the number of steps is train.steps": "max_steps num_steps train_iters max_iters",
    "the learning rate is optim.lr": "lr learning_rate",
    "the schedule is lr_schedule=cosine|linear|wsd|constant": "lr_scheduler lr_scheduler_type lr_decay_style",
    "the schedule ends at lr_schedule.min_ratio times optim.lr": "min_lr",
    "linear warm-up is lr_schedule.warmup_steps, or lr_schedule.warmup_ratio": (
        "warmup warmup_steps lr_warmup_steps warmup_iters"
    ),
    "linear warm-up is lr_schedule.warmup_ratio, a share of train.steps": "warmup_ratio",
    "weight decay is optim.weight_decay": "weight_decay",
    "AdamW's betas are optim.betas=[0.9,0.95]": "adam_beta1 adam_beta2",
    "AdamW's epsilon is optim.eps": "adam_epsilon",
    "gradients are clipped to a norm of optim.max_norm": "max_grad_norm clip_grad gradient_clip_val",
    "AdamW is optim=adamw": "adam adamw_torch adamw_torch_fused adamw_hf fused_adam",
    "8-bit AdamW is optim=adamw8bit": "adamw_8bit adamw_bnb_8bit paged_adamw_8bit",
    OWN_OPTIMIZER: "lion adafactor shampoo soap sophia schedule_free lamb",
    "the optimizer is optim=adamw|adamw8bit|adamwfp8|muon|sgd|custom": "optimizer",
    STOPPING: "early_stopping_patience early_stopping",
    "checkpoint.keep_best=1 keeps the best checkpoint next to the latest": "load_best_model_at_end",
    # memory
    CHECKPOINTING: (
        "gradient_checkpointing activation_checkpointing activation_checkpoint recompute_granularity remat "
        "recompute_activations recompute_method recompute_num_layers"
    ),
    "activations go to host memory with passes.remat.policy=offload": "cpu_offload",
    # ranks
    SHARDING: "fsdp fsdp_config deepspeed zero_stage zero use_distributed_optimizer",
    "parameters are replicated over mesh.dp_replicate": "ddp",
    REPLICAS: "data_parallel_size dp dp_size data_parallel",
    "sharded data parallelism is mesh.dp_shard": "data_parallel_shard_degree",
    "replicated data parallelism is mesh.dp_replicate": "data_parallel_replicate_degree",
    "tensor parallelism is mesh.tp": "tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size",
    "context parallelism is mesh.cp": "context_parallel_size context_parallel_degree",
    "sequence parallelism comes with mesh.tp, unless passes.shard.sequence_parallel=false": "sequence_parallel",
    "expert parallelism is mesh.ep": "expert_parallel_size expert_parallel_degree expert_model_parallel_size",
    PIPELINE: "pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size pp_size",
    DEVICE: "device no_cuda use_cpu",
    "torchrun --nproc-per-node N -m compiler_trainer starts N ranks; mesh divides the work among them": "devices",
    "torchrun --nproc-per-node N -m compiler_trainer starts N ranks; cluster.gpus is for a plan or dry run": "num_gpus",
    "mesh says how ranks divide a model and its data; mesh=auto plans it": "strategy",
    # sequences, model, data
    "the sequence length is train.seq_len": (
        "context_length max_seq_length max_length sequence_len seq_length seq_len block_size"
    ),
    ATTENTION: "attn_implementation flash_attention use_flash_attention_2",
    BUILT: "torch_compile compile",
    MODEL: "model_name_or_path base_model pretrained_model_name_or_path hub_model_id",
    "the tokenizer is data.tokenizer=FOLDER/tokenizer.json; of model=hf it is the folder's": "tokenizer tokenizer_name",
    LORA: (
        "lora_r lora_rank lora_alpha lora_dropout lora_target_modules target_modules lora_target_linear peft use_peft "
        "adapter lora"
    ),
    DATA: "dataset datasets dataset_name dataset_path train_file data_path",
    VALIDATION: "validation_file eval_dataset val_set_size",
    PACKING: "packing sample_packing pack_sequences group_by_length",
    "text is tokenized once into a cache on disk (data.cache) and read from there": "streaming",
    "with data.chat=true only the assistant's answers count in the loss": "assistant_only_loss train_on_inputs",
    "with data.train_on=last only the last answer of a conversation counts in the loss": "mask_history",
    FORMATS: "dataset_format chat_format formatting",
    "a thread prepares the next batch; all cores tokenize text": "num_workers dataloader_num_workers",
    # what is written
    EVALUATION: "eval_steps eval_interval eval_strategy evaluation_strategy",
    "a checkpoint is written every checkpoint.interval steps": "save_steps save_interval save_strategy",
    "null turns it off: checkpoint.interval=null, eval.interval=null, passes.segment.max_nodes=null": "enabled",
    "the newest checkpoint.keep checkpoints are kept": "save_total_limit",
    "the run folder is run.dir": "output_dir logging_dir save_dir dump_folder run_name",
    RESUME: "resume_from_checkpoint ckpt_path load load_path",
    "each step is in metrics.jsonl; the screen shows ten lines of a run, or one that is updated": (
        "logging_steps log_interval"
    ),
    LOGGERS: "wandb wandb_project use_wandb enable_wandb tensorboard report_to logger mlflow comet trackio",
    "run.profile=true writes a trace of three steps, for Perfetto": "profile profiler",
    CALLBACKS: "callback callbacks",
    EMA: "ema_decay use_ema",
    "there is none: compiler-trainer export RUN FOLDER writes a folder for `hf upload`": "push_to_hub",
    "the seed is train.seed; data.seed is the seed of the order of data": "seed",
    PREFERENCES: "dpo ipo simpo orpo cpo kto",
    NLL_WEIGHT: "cpo_alpha rpo_alpha",
    REWARDS: "reward_model reward_trainer bradley_terry",
    "classification of texts is recipe=classify data.labels=[a,b]": "classification num_labels text_classification",
    "embeddings by a contrastive loss are recipe=embed": "embedding embeddings contrastive infonce",
    "the weight of the squared sum of a pair's scores is loss.center, with loss=reward": "center_rewards_coefficient",
    "the target of the margin is loss.gamma, with loss=simpo": "simpo_gamma",
    "the reference is the weights that training starts from; its log-probabilities are computed once": "ref_model",
    SFT: "sft instruct finetuning full_finetune finetune fine_tune fine_tuning",
    "pretraining is recipe=pretrain, with a model by name and data.tokenizer": "pretraining",
    "the beta of a preference loss is loss.beta, with loss=dpo": "beta",
    "DoRA is model.lora.dora=true, next to recipe=lora": "dora use_dora",
    f"scaling of positions: {CONTEXT}": "yarn rope_type rope_parameters",
    FROZEN: "freeze freeze_layers unfrozen_parameters",
    LIGER: "liger liger_kernel use_liger_kernel",
    "SLURM: `srun compiler-trainer ...` (docs/guides/several-nodes.md)": "slurm sbatch",
    "code of a model's folder is never run; model.path takes the models that transformers builds": "trust_remote_code",
    "the chat template is the tokenizer's own, in the folder of model.path": "chat_template",
    JOB_FILE: "config config_file config_name config_path yaml toml",
    RANKS: "nnodes num_nodes nproc_per_node num_processes",
    SIZES: "num_layers hidden_size num_attention_heads ffn_hidden_size",
    OTHER_GPU: "b200 b300 gb200 v100 l40s l4 a10 rtx4090 mi300x",
    GRPO: "grpo dapo gspo dr_grpo rloo rlvr reward_funcs reward_functions",
    f"there is no PPO with a value model; {GRPO}": "rlhf ppo",
    "the number of answers to a prompt is loss.group_size, with loss=grpo": "num_generations",
    "the longest answer is loss.answer_tokens, with loss=grpo": "max_completion_length",
    ROLLOUTS: "steps_per_generation num_iterations",
    "a vLLM or SGLang server that draws answers is loss.server=http://HOST:PORT, with loss=grpo": (
        "use_vllm vllm_mode vllm_server_host vllm_server_port vllm_server_base_url"
    ),
    f"{PREFERENCES}; a loss of your own is loss._target_=package.function": "loss_type",
}
ANSWERS = {name: answer for answer, names in NAMES.items() for name in names.split()}
VALUES = {  # option or group -> hint for a value that is not one of its choices
    "model": f"{MODEL}; a module of your own is model=custom model._target_=package.Class",
    "data": DATA,
    "optim": OWN_OPTIMIZER,
    "lr_schedule": "a schedule of your own is lr_schedule=custom lr_schedule._target_=package.function",
    "loss": "a loss of your own is loss._target_=package.function",
    "cluster": "the file of another GPU goes into a folder for --config-dir (docs/reference/clusters.md)",
    "recipe": "compiler-trainer --help recipe describes them",
    "passes.cast.float8": NO_BLOCKS,
    "passes.moe.dispatch": "counts of rows stay on the device, so buffer sizes cannot depend on them",
    "train.dtype": "it is the dtype of master weights; mixed precision is train.precision=bf16 over float32 ones",
}


def answer(name: str) -> str | None:
    """Return the answer for another trainer's option, whatever its group; None if the name is unknown."""
    return ANSWERS.get(plain(name))


def answer_near(name: str) -> str | None:
    """Return the answer for the most similar name of another trainer's; None if none is similar."""
    near = difflib.get_close_matches(plain(name), list(ANSWERS), n=1, cutoff=0.85)
    return ANSWERS[near[0]] if near else None


def plain(name: str) -> str:
    """Return an option's name without its group, in lower case and with underscores."""
    return name.rpartition(".")[2].lower().replace("-", "_")
