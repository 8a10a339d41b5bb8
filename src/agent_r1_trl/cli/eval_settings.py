"""Settings of `eval` that make a table of it: what is compared, how tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass, field

from agent_r1_trl.cli.errors import UsageError
from agent_r1_trl.objects import did_you_mean

BASELINES = ("base", "naive_rag", "closed_book")


@dataclass
class TableSettings:
    """Settings of `eval` beside limits and environment."""

    model_name_or_path: list[str] | None = field(
        default=None,
        metadata={
            "help": "Models or PEFT adapters, one or several: directories or Hub ids.",
            "aliases": ["--model", "--models"],
        },
    )
    eval_dataset_name: list[str] | None = field(
        default=None,
        metadata={
            "help": "Data sets, one or several: .jsonl, .json, .csv or .parquet files, directories, or Hub ids.",
            "aliases": ["--dataset", "--datasets"],
        },
    )
    baselines: list[str] | None = field(
        default=None,
        metadata={
            "help": "What to play beside the model, on the same rows: 'base': the base model in the same environment; "
            "'naive_rag': one search with the question, one answer; 'closed_book': no tools, one answer."
        },
    )
    base_model: str | None = field(
        default=None,
        metadata={
            "help": "The model of the baselines. None: the recipe's model, where --model names others, or the one "
            "that the adapters were trained on; without any, a single model plays naive_rag and closed_book itself."
        },
    )
    baseline_prompt: str | None = field(
        default=None,
        metadata={"help": "System message of naive_rag and closed_book. None: the environment's."},
    )
    top_p: float = field(
        default=1.0,
        metadata={"help": "Draw from the likeliest tokens, up to this share of the probability. Greedy: no effect."},
    )
    top_k: int = field(
        default=0, metadata={"help": "Draw from this many of the likeliest tokens; 0: from all. Greedy: no effect."}
    )
    min_p: float | None = field(
        default=None,
        metadata={"help": "Least probability of a token, as a share of the likeliest one's. Greedy: no effect."},
    )
    repetition_penalty: float = field(
        default=1.0, metadata={"help": "Above 1: tokens that stood before are less likely, in greedy decoding, too."}
    )

    by: str | None = field(
        default=None,
        metadata={"help": "Column of the rows, such as 'level' or 'metadata.type': also the figures of each value."},
    )
    price_per_million_tokens: list[float] | None = field(
        default=None,
        metadata={"help": "Price of tokens read and of tokens sampled (one number: of both), for a column of costs."},
    )

    report_to: list[str] | None = field(
        default=None,
        metadata={
            "help": "Trackers that get the figures, the table and some trajectories: tensorboard, trackio, wandb, or "
            "none. A recipe's report_to is for the training alone."
        },
    )
    run_name: str | None = field(
        default=None, metadata={"help": "Name of the run in the trackers. None: eval- and the name of output_dir."}
    )

    resume: bool = field(
        default=True,
        metadata={
            "help": "Go on with an evaluation that was killed in output_dir, from its journal; --no_resume: anew."
        },
    )

    def check_table(self) -> None:
        """Refuse baselines that do not exist, settings of baselines without any, and prices that are none.

        Raises:
            UsageError: names the setting, the value and the cure.
        """
        for name in self.baselines or ():
            if name not in BASELINES:
                hint = did_you_mean(name, BASELINES)
                raise UsageError(f"baselines={name!r}: must be some of {', '.join(BASELINES)}.{hint} Set it to those.")
        for name, readers in {"base_model": BASELINES, "baseline_prompt": BASELINES[1:]}.items():
            if getattr(self, name) is not None and not set(readers) & set(self.baselines or ()):
                raise UsageError(
                    f"{name}={getattr(self, name)!r} has no effect with baselines={self.baselines}. Set baselines to "
                    f"some of {', '.join(readers)}, or remove {name}."
                )
        prices = self.price_per_million_tokens
        if prices is not None and (len(prices) not in (1, 2) or not all(price >= 0 for price in prices)):
            raise UsageError(
                f"price_per_million_tokens={prices}: must be one or two prices >= 0. Set it to that of the tokens "
                "read and that of the tokens sampled."
            )
