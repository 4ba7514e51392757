"""tiny: every stage of the pipeline in well under a minute on one core. Learns next to nothing, on purpose."""

from modelwright.compress.int8 import Int8WeightsConfig
from modelwright.data.pack import PackConfig
from modelwright.data.sources import SourceConfig
from modelwright.data.tokenizer import TokenizerConfig
from modelwright.evaluate.config import EvaluateConfig, MultipleChoiceConfig
from modelwright.model.config import ModelConfig
from modelwright.optim.schedule import ScheduleConfig
from modelwright.pipeline.config import HardwareConfig, RunConfig, ServeCheckConfig
from modelwright.precision.policy import PrecisionConfig
from modelwright.train.config import TrainConfig

SEQ_LEN = 512
"""At two bytes a token usual question/answer pairs fit: 99% of the 7,473 of GSM8K, of which 128 tokens hold 8%."""
VOCAB_SIZE = 768


def tiny() -> RunConfig:
    """The whole pipeline in under a minute on one core: a smoke test with 0.1 million parameters.

    Everything is fixed (one thread, FP32, CPU), so that two runs on one machine end with the same bits.
    """
    fp32 = PrecisionConfig(policy="fp32", onednn=False)
    return RunConfig(
        name="tiny",
        hardware=HardwareConfig(device="cpu", num_threads=1),
        data=SourceConfig(builtin_fraction=0.06),
        tokenizer=TokenizerConfig(vocab_size=VOCAB_SIZE),
        pack=PackConfig(seq_len=SEQ_LEN),
        model=ModelConfig(
            vocab_size=VOCAB_SIZE,
            num_layers=2,
            model_dim=64,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            ffn_dim=128,
            max_seq_len=SEQ_LEN,
        ),
        pretrain=TrainConfig(
            num_steps=40,
            batch_tokens=4 * SEQ_LEN,
            learning_rate=5e-3,
            precision=fp32,
            eval_every_steps=20,
            checkpoint_every_steps=10,
        ),
        sft=TrainConfig(
            num_steps=20,
            batch_tokens=4 * SEQ_LEN,
            num_microbatches=2,
            learning_rate=2e-3,
            weight_decay=0.01,
            schedule=ScheduleConfig(kind="warmup_linear"),
            precision=fp32,
            eval_every_steps=10,
            checkpoint_every_steps=5,
        ),
        evaluate=EvaluateConfig(
            max_bytes_per_kind=20_000,
            bootstrap_resamples=200,
            multiple_choice=MultipleChoiceConfig(num_questions=40),
        ),
        quantize=Int8WeightsConfig(backend="int_mm"),
        serve=ServeCheckConfig(questions=("What does `len` do?",), num_heldout_questions=2, max_tokens=16),
    )
