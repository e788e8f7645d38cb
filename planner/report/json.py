"""The JSON report, schema 1: bytes as integers, keys sorted, settings as their libraries spell them."""

import json
from collections.abc import Sequence

from planner.gpus.cluster import Cluster
from planner.jobs.job import Job
from planner.jobs.settings import settings_of, settings_of_fields
from planner.plan import Plan
from planner.quantities import Estimate, GpuMemory, Throughput
from planner.report.proof import proof_report

SCHEMA = 1
Json = dict[str, object]

# Decimals of seconds, tokens per second and probabilities: far below what any of them is known to.
DECIMALS = 6


def plan_report(plan: Plan) -> Json:
    """What `plan --json` prints."""
    return {
        "schema": SCHEMA,
        "job": _job(plan.job),
        "cluster": _cluster(plan.cluster),
        "verdict": plan.verdict,
        "best": _estimate(plan.best),
        "alternatives": [
            {"label": other.label, "note": other.note, **_estimate(other.estimate)} for other in plan.alternatives
        ],
        "remedies": [
            {"change": remedy.change, "note": remedy.note, **_estimate(remedy.estimate)} for remedy in plan.remedies
        ],
        "more": list(plan.more),
        "warnings": list(plan.warnings),
        "versions": dict(plan.versions),
        **({"proof": proof_report(plan.proof)} if plan.proof is not None else {}),
    }


def estimate_report(estimate: Estimate, warnings: Sequence[str] = ()) -> Json:
    """What `plan estimate --json` prints: an object shaped as `best` of a plan, with the schema and the warnings beside."""
    return {"schema": SCHEMA, "warnings": list(warnings), **_estimate(estimate)}


def json_text(report: Json) -> str:
    """One document; the same report gives the same text."""
    return json.dumps(report, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)


def _estimate(estimate: Estimate) -> Json:
    return {
        "settings": settings_of(estimate.candidate),
        "fits": estimate.fits,
        "fit_probability": round(estimate.fit_probability, DECIMALS),
        "evidence": estimate.evidence,
        "gpus": [_gpu(gpu) for gpu in estimate.gpus],
        "host": {"peak_bytes": estimate.host_peak_bytes},
        "throughput": _throughput(estimate.throughput),
        "reasons": list(estimate.reasons),
        **({"device": estimate.device} if estimate.device != "none" else {}),
    }


def _gpu(gpu: GpuMemory) -> Json:
    return {
        "role": gpu.role,
        "count": gpu.count,
        "capacity_bytes": gpu.capacity_bytes,
        "peak_bytes": gpu.peak_bytes,
        "peak_phase": gpu.peak_phase,
        "interval_bytes": list(gpu.interval_bytes),
        "phases": [
            {"name": phase.name, "total_bytes": phase.total_bytes, "components": dict(phase.components)}
            for phase in gpu.phases
        ],
        "details": {component: dict(parts) for component, parts in gpu.details.items()},
    }


def _throughput(throughput: Throughput) -> Json:
    return {
        "tokens_per_second": round(throughput.tokens_per_second, DECIMALS),
        "step_seconds": round(throughput.step_seconds, DECIMALS),
        "seconds": {cause: round(seconds, DECIMALS) for cause, seconds in throughput.seconds.items()},
        "evidence": throughput.evidence,
    }


def _job(job: Job) -> Json:
    return {
        "model": job.model.id,
        "method": job.method,
        "tuning": job.tuning,
        "pinned": settings_of_fields(job.pinned),
        "optimize": job.optimize,
        "risk": job.risk,
        "effective_batch_size": job.effective_batch_size,
        "trl_version": job.trl_version,
    }


def _cluster(cluster: Cluster) -> Json:
    gpu = cluster.gpu
    return {
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "gpu": {
            "name": gpu.name,
            "total_bytes": gpu.total_bytes,
            "free_bytes": gpu.free_bytes,
            "bf16_flops": gpu.bf16_flops,
            "memory_bytes_per_second": gpu.memory_bytes_per_second,
            "nvlink_bytes_per_second": gpu.nvlink_bytes_per_second,
            "pcie_bytes_per_second": gpu.pcie_bytes_per_second,
            "compute_capability": list(gpu.compute_capability),
            "source": gpu.source,
        },
    }
