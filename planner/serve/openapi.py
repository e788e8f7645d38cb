"""The OpenAPI document of the server, made from the types of its bodies and of the command's documents."""

from msgspec import Struct
from msgspec.json import schema_components

from planner.report.documents.commands import ComparisonReport, DiagnosisReport, ErrorDocument
from planner.report.documents.plans import EstimateReport, PlanReport
from planner.requests.bodies import REQUIRED, CompareRequest, EstimateRequest, PlanRequest
from planner.serve.requests import DiagnoseRequest

# Path -> what it does, the type of its body, the type of its answer.
OPERATIONS: dict[str, tuple[str, type[Struct], type[Struct]]] = {
    "/plan": ("Search the largest, fastest configuration that fits, as `plan --json`.", PlanRequest, PlanReport),
    "/compare": ("Plan one job on several clusters, as `plan --gpus A,B --json`.", CompareRequest, ComparisonReport),
    "/estimate": ("Estimate one candidate, as `plan estimate --json`.", EstimateRequest, EstimateReport),
    "/diagnose": ("Explain a log, as `plan diagnose --json`.", DiagnoseRequest, DiagnosisReport),
}
ERRORS = {
    "400": "The body is no JSON in UTF-8, or is not sent as HTTP says.",
    "401": "The token is missing or wrong.",
    "408": "The body does not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not sent as application/json.",
    "422": "The job cannot be planned: the message says why, and what would work.",
    "503": "Too many requests at once, or the answer takes too long.",
}


def openapi(with_token: bool) -> dict[str, object]:
    """Return the OpenAPI document; `with_token`: requests need one."""
    documents = [kind for _, *kinds in OPERATIONS.values() for kind in kinds] + [ErrorDocument]
    references, schemas = schema_components(documents, ref_template="#/components/schemas/{name}")
    for kind in (PlanRequest, CompareRequest, EstimateRequest):
        schemas[kind.__name__]["required"] = list(REQUIRED)
    by_type = dict(zip(documents, references, strict=True))
    components: dict[str, object] = {"schemas": schemas}
    security: dict[str, object] = {}
    if with_token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        security = {"security": [{"token": []}]}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "plan",
            "version": "1",
            "description": "Plans fine-tuning with TRL: memory in bytes as integers, time in seconds.",
        },
        **security,
        "paths": {
            path: {"post": _operation(path, summary, by_type[body], by_type[answer], by_type[ErrorDocument])}
            for path, (summary, body, answer) in OPERATIONS.items()
        },
        "components": components,
    }


def _operation(path: str, summary: str, body: object, answer: object, error: object) -> dict[str, object]:
    return {
        "operationId": path.strip("/"),
        "summary": summary,
        "requestBody": {"required": True, "content": _json(body)},
        "responses": {
            "200": {"description": "The document of the command.", "content": _json(answer)},
            **{status: {"description": text, "content": _json(error)} for status, text in ERRORS.items()},
        },
    }


def _json(schema: object) -> dict[str, object]:
    return {"application/json": {"schema": schema}}
