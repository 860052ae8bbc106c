"""What the Open Inference Protocol answers to a failure."""

from typing import Any

from service.http import problems
from service.http.openapi import problem_responses, ref
from service.http.v2.schemas import V2Problem


def v2_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's documentation: the same problems as elsewhere, in the protocol's own form."""
    responses = problem_responses(*statuses)
    for response in responses.values():
        response["content"] = {problems.V2_MEDIA_TYPE: {"schema": ref(V2Problem)}}
    return responses
