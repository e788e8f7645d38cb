"""What PEFT's preparation casts of a quantized base, and FlashAttention's refusal of float32."""

import pytest

from planner.candidate import Candidate
from planner.errors import InputError
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.jobs.base_candidate import single_candidate
from planner.jobs.job import Job
from planner.memory.parameters.kbit_preparation import prepared_bytes
from planner.memory.passes import final_norm, head_of
from planner.memory.stack_recipe import policy_recipe
from planner.models.catalogue import load_model
from planner.units import MIB


class TestKbitPreparation:
    def candidate(self, model: str = "Qwen3-0.6B", **settings: object) -> Candidate:
        arguments = {"tuning": "lora", "quantization": "nf4", "method": "orpo", **settings}
        return Candidate(model=load_model(model), **arguments)  # type: ignore[arg-type]

    def test_orpo_leaves_norms_in_float32_and_the_embedding_in_bfloat16(self) -> None:
        prepared = prepared_bytes(self.candidate())
        assert prepared is not None
        assert (prepared.embedding, prepared.head, prepared.rest) == (2, 2, 4)

    def test_an_embedding_of_another_name_stays_in_float32(self) -> None:
        prepared = prepared_bytes(self.candidate("pythia-410m"))
        assert prepared is not None
        assert (prepared.embedding, prepared.head) == (4, 2)

    def test_an_8_bit_base_stays_in_float32(self) -> None:
        prepared = prepared_bytes(self.candidate(quantization="int8"))
        assert prepared is not None
        assert prepared.embedding == 4

    def test_stable_trainers_do_not_prepare(self) -> None:
        assert prepared_bytes(self.candidate(method="dpo")) is None

    @pytest.mark.parametrize("quantization", ["nf4", "int8"])
    def test_a_script_that_prepares_leaves_all_in_float32(self, quantization: str) -> None:
        asked = self.candidate(method="sft", quantization=quantization, prepare_model_for_kbit_training=True)
        assert prepared_bytes(asked) == (4, 4, 4, 4)

    def test_online_dpo_casts_nothing_on_an_8_bit_base(self) -> None:
        assert prepared_bytes(self.candidate(method="online-dpo", quantization="int8")) is None

    def test_a_prepared_base_on_a_t4_is_loaded_as_measured(self) -> None:
        """fitcheck-llm, Llama-3.2-1B, nf4, r 16 on attention: 1,538 MiB after loading."""
        asked = self.candidate(
            "Llama-3.2-1B", method="sft", dtype="float16", precision="no", prepare_model_for_kbit_training=True,
            float32_adapters=True, lora_target_modules=("q_proj", "k_proj", "v_proj", "o_proj"),
        )  # fmt: skip
        load = estimate(asked, parse_cluster("1xT4", None)).gpus[0].phases[0].components
        assert (load["weights"] + load["adapters"]) / MIB == pytest.approx(1538.1, abs=1)

    def test_a_prepared_head_multiplies_in_float32_without_autocast(self) -> None:
        asked = self.candidate(
            method="sft", trl_version="1.4", precision="no", dtype="float16", prepare_model_for_kbit_training=True
        )
        assert head_of(asked, final_norm(asked, policy_recipe(asked), 4), False).weight_cast_bytes == 0


class TestFlashAttentionInFloat32:
    def job(self, method: str, **pinned: object) -> Job:
        return Job(
            model=load_model("Qwen2.5-1.5B"),
            method=method,  # type: ignore[arg-type]
            tuning="lora",
            pinned={"attn_implementation": "flash_attention_2", **pinned},
        )

    @pytest.mark.parametrize(
        ("method", "pinned"),
        [
            ("distillation", {"dtype": "float32"}),
            ("grpo", {"dtype": "float32", "vllm": "off"}),
            ("sft", {"dtype": "float32", "precision": "no"}),
        ],
    )
    def test_is_refused(self, method: str, pinned: dict[str, object]) -> None:
        with pytest.raises(InputError, match="has kernels for 16 bits only"):
            single_candidate(self.job(method, **pinned), parse_cluster("1xA100-40G", None))

    def test_autocast_makes_16_bits_of_it(self) -> None:
        assert single_candidate(self.job("sft", dtype="float32"), parse_cluster("1xA100-40G", None))


def test_checkpointing_takes_the_cache_from_online_dpo() -> None:
    candidate = Candidate(model=load_model("Qwen2.5-1.5B"), method="online-dpo", gradient_checkpointing=True)
    assert candidate.generates_without_cache
    assert not Candidate(model=candidate.model, method="grpo", gradient_checkpointing=True).generates_without_cache
