"""`plan estimate` in Python, from TRL's own configs: `estimate(SFTConfig(...), Qwen2Config(...), "1xL4")`."""

from typing import TYPE_CHECKING, Any

from msgspec.structs import fields

from planner.candidate import Candidate
from planner.errors import InputError, shortened
from planner.estimation import accepted
from planner.estimation import estimate as estimate_candidate
from planner.gpus.cluster import Cluster
from planner.jobs.job import LARGEST_RISK, SMALLEST_RISK
from planner.notebook.answer import WIDTH, table_html
from planner.notebook.arguments import options_of
from planner.quantities import DEFAULT_RISK, Estimate, Note
from planner.report.spelling import errors_spelled

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


class EstimateAnswer(Estimate, frozen=True, kw_only=True):
    """An estimate that a notebook shows as the command's table. `warnings`: settings that it does not count."""

    cluster: Cluster
    warnings: tuple[Note, ...] = ()

    def __repr__(self) -> str:
        """Return the command's table."""
        from planner.report.table import estimate_table

        return estimate_table(self, self.cluster, self.warnings, WIDTH).plain

    def _repr_html_(self) -> str:
        """Return the table as HTML without colours of its own, so that it suits light and dark notebooks."""
        return table_html(repr(self))

    def plot_memory(self) -> "Figure":
        """Return a bar of memory for each phase of the step, with the card's end and the interval of the peak.

        Raises:
            PlanError: plotly is not installed.
        """
        from planner.notebook.figures import memory_figure

        return memory_figure(self)


@errors_spelled("python")
def estimate(args: Any, model: Any, gpus: Any = None, /, *, peft_config: Any = None, **asked: Any) -> EstimateAnswer:
    """Estimate the memory and the speed of one training, as `plan estimate` does with the same settings in a file.

    Args:
        args: TRL's config of a method, such as `SFTConfig(...)`; or a `Candidate`, with its `Cluster` and a `risk`; or
            a name as `--model`, followed by the GPUs.
        model: a Transformers config, TRL's `ModelConfig`, or a name as `--model`.
        gpus: as `--gpus`: "1xL4".
        peft_config: PEFT's `LoraConfig`.
        asked: the command's flags (`risk`, `prompt_length`, `free_memory`, `accelerate_config`, `deepspeed_config`,
            ...) with underscores, and settings by the libraries' names; they win over `args`.

    Example: `estimate(SFTConfig(max_length=4096, use_cpu=True), "Qwen2.5-7B", "1xL4", peft_config=LoraConfig(r=16))`.
    Without a config: `estimate("Llama-3.1-8B", "1xRTX-4090", method="sft", tuning="lora")`.
    On a machine without a GPU, TRL's configs want `use_cpu=True` or `bf16=False`; `use_cpu` changes no estimate.

    Raises:
        PlanError: what the command refuses, in Python's words; or `args` is no config of a TRL method.
    """
    if isinstance(args, Candidate):
        if not isinstance(model, Cluster) or gpus is not None or asked.keys() - {"risk"}:
            raise InputError("estimate takes a Candidate with its Cluster, and no setting but risk=0.05 beside them.")
        return _estimate_of_candidate(args, model, asked.get("risk", DEFAULT_RISK))
    from planner.ask import estimated, silent
    from planner.requests.options import CandidateOptions
    from planner.requests.read_options import read_options
    from planner.requests.trl_objects import read_objects
    from planner.training_stack import complete_models

    if isinstance(args, str):
        named = options_of(CandidateOptions, _names(args, model, gpus, peft_config), asked)
        request = read_options(named, complete_models(silent))
        answer, notes = estimated(request)
        return _answer(answer, request.cluster, notes)
    read = read_objects(args, model, peft_config)
    options = options_of(CandidateOptions, {"model": read.model, "gpus": gpus, "method": read.method}, asked)
    if options.config is not None:
        raise InputError(f"config={shortened(options.config)} contradicts the {type(args).__name__}. Drop one of them.")
    request = read_options(options, complete_models(silent), read.load, read.train)
    answer, notes = estimated(request)
    return _answer(answer, request.cluster, notes)


def _estimate_of_candidate(candidate: Candidate, cluster: Cluster, risk: object) -> EstimateAnswer:
    if not isinstance(risk, int | float) or not SMALLEST_RISK <= risk <= LARGEST_RISK:
        raise InputError(
            f"risk={shortened(risk)} is not between {SMALLEST_RISK:f} and 0.5. Give a probability such as 0.05."
        )
    return _answer(accepted(estimate_candidate(candidate, cluster, risk)), cluster, ())


def _names(model: str, gpus: Any, third: Any, peft_config: Any) -> dict[str, Any]:
    """Return the options of `estimate(model, gpus)`.

    Raises:
        InputError: there is a third argument, or a LoraConfig, which only a TRL config has beside it.
    """
    if third is not None or peft_config is not None:
        raise InputError(
            "estimate takes a TRL config, a model and its GPUs; or two names and settings, as "
            "estimate('Llama-3.1-8B', '1xRTX-4090', method='sft', tuning='lora')."
        )
    return {"model": model, "gpus": gpus}


def _answer(found: Estimate, cluster: Cluster, warnings: tuple[Note, ...]) -> EstimateAnswer:
    own = {field.name: getattr(found, field.name) for field in fields(Estimate)}
    return EstimateAnswer(**own, cluster=cluster, warnings=warnings)
