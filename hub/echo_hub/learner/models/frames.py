"""The frames between the hub and its process of tenants' models. Loads no torch.

The hub sends {call, command, ...}; `call` is the request's number. The process answers with {call, kind: "result", ...}
or {call, kind: "error", ...}. Before the result of "draw" come any number of samples, {call, kind: "sample", ...}, and
{call: 0, kind: "pieces", pieces} with new tokens of unfinished samples of several calls. "cancel" has no answer.
"""

from __future__ import annotations

from echo_hub.learner import frames
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import Datum, ForwardBackward, LossFunction, PassResult, PromptLogprobs
from echo_shared.errors import EchoError
from echo_shared.process.child import Frame


def pack_pass(request: ForwardBackward) -> Frame:
    return {
        "data": [{"input_ids": datum.input_ids, "loss_inputs": dict(datum.loss_inputs)} for datum in request.data],
        "loss": request.loss.value,
        "config": dict(request.config),
        "forward_only": request.forward_only,
    }


def unpack_pass(frame: Frame) -> ForwardBackward:
    return ForwardBackward(
        data=tuple(Datum(**datum) for datum in frame["data"]),
        loss=LossFunction(frame["loss"]),
        config=frame["config"],
        forward_only=frame["forward_only"],
    )


def pack_result(result: PassResult) -> Frame:
    return {"logprobs": list(result.logprobs), "metrics": dict(result.metrics)}


def unpack_result(frame: Frame) -> PassResult:
    return PassResult(logprobs=tuple(frame["logprobs"]), metrics=frame["metrics"])


def pack_logprobs(found: PromptLogprobs) -> Frame:
    return {
        "logprobs": found.logprobs,
        "topk_ids": found.topk_ids,
        "topk_logprobs": found.topk_logprobs,
        "target_logprobs": found.target_logprobs,
    }


def unpack_logprobs(frame: Frame) -> PromptLogprobs:
    names = ("logprobs", "topk_ids", "topk_logprobs", "target_logprobs")
    return PromptLogprobs(**{name: frame[name] for name in names})


def pack_error(error: EchoError) -> Frame:
    kind, param = (error.kind.value, error.param) if isinstance(error, Refusal) else ("", "")
    return {"kind": "error", **frames.pack_error(error), "refusal": kind, "param": param}


def unpack_error(frame: Frame) -> EchoError:
    if frame.get("refusal"):
        kind = RefusalKind(frame["refusal"])
        return Refusal(kind, frame["what"], got=frame["got"], do=frame["do"], param=frame["param"])
    return frames.unpack_error(frame)
