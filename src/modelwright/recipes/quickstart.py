"""quickstart: the whole way on two CPU cores, from the text that is on every machine to a served model."""

from modelwright.data.pack import PackConfig
from modelwright.data.sources import SourceConfig
from modelwright.data.tokenizer import TokenizerConfig
from modelwright.evaluate.config import EvaluateConfig, MultipleChoiceConfig
from modelwright.model.config import ModelConfig
from modelwright.optim.schedule import ScheduleConfig
from modelwright.pipeline.config import RunConfig, ServeCheckConfig
from modelwright.train.config import TrainConfig

SEQ_LEN = 512
VOCAB_SIZE = 8192


def quickstart() -> RunConfig:
    """About 7 million parameters trained on Python's own libraries, in a quarter of an hour on two CPU cores.

    Batches are small (2,048 tokens) because the budget is time: at this size many small steps learn more per second
    than few large ones, until the gradient noise is the limit.
    """
    return RunConfig(
        name="quickstart",
        data=SourceConfig(),
        tokenizer=TokenizerConfig(vocab_size=VOCAB_SIZE),
        pack=PackConfig(seq_len=SEQ_LEN),
        model=ModelConfig(
            vocab_size=VOCAB_SIZE,
            num_layers=6,
            model_dim=256,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            ffn_dim=768,
            max_seq_len=SEQ_LEN,
        ),
        pretrain=TrainConfig(
            num_steps=700,
            batch_tokens=4 * SEQ_LEN,
            learning_rate=4e-3,
            weight_decay=0.1,
            schedule=ScheduleConfig(kind="warmup_cosine", warmup_fraction=0.1, final_fraction=0.05),
            eval_every_steps=350,
            checkpoint_every_minutes=1.0,
        ),
        sft=sft_settings(num_epochs=1.0),
        evaluate=EvaluateConfig(
            max_bytes_per_kind=150_000, multiple_choice=MultipleChoiceConfig(num_questions=500), context_overlap=0.25
        ),
        serve=ServeCheckConfig(questions=("What does `shutil.copytree` do?", "What is `collections.OrderedDict`?")),
    )


def sft_settings(*, num_epochs: float) -> TrainConfig:
    """Fine-tuning as published for large models (AdamW, weight decay 0.01, warmup then linear decay, accumulation 4),
    with the learning rate scaled for a small one: 2e-5 belongs to models of a thousand times the size, whose best
    pretraining rate is about thirty times smaller than ours too; 1e-3 is a quarter of our pretraining peak.
    """
    return TrainConfig(
        num_epochs=num_epochs,
        batch_tokens=8 * SEQ_LEN,
        num_microbatches=4,
        learning_rate=1e-3,
        weight_decay=0.01,
        schedule=ScheduleConfig(kind="warmup_linear", warmup_fraction=0.1, final_fraction=0.0),
        eval_every_steps=50,
        checkpoint_every_minutes=1.0,
    )
