"""Actor: does the steps of a schedule on a simulator, and knows which requests must fail."""

from __future__ import annotations

from functools import lru_cache

from cllm.engine.core.scheduler import seq_id_of
from cllm.engine.lora import NO_LORA, LoraUse
from cllm.engine.media_rows import Spans
from cllm.engine.sampling_params import SamplingParams
from cllm.testing.fake_decoder import Fault
from tests.simulation.expect import demand, expect
from tests.simulation.images import tokens_of
from tests.simulation.simulator import Simulator
from tests.simulation.steps import (
    Cancel,
    FailCall,
    FailDecode,
    ReadOn,
    ResetPrefixCache,
    Step,
    StopReading,
    Submit,
    Suspend,
    Tick,
    Wait,
)

MAX_TICKS = 2000


@lru_cache(1000)
def _params(max_tokens: int | None, temperature: float, stop: tuple[str, ...]) -> SamplingParams:
    """Return cached parameters: checking new ones takes longer than a tick."""
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, stop=stop)


class Actor:
    """Does the steps of a schedule on a simulator, and knows which requests must fail."""

    def __init__(self, sim: Simulator) -> None:
        self._sim = sim
        self._ids: dict[str, str] = {}
        self._doomed: set[str] = set()
        sim.decoder.on_decode = self._look

    def _alive(self, name: str) -> str | None:
        request_id = self._ids.get(name)
        return None if request_id in self._sim.finished else request_id

    def do(self, step: Step) -> None:
        sim = self._sim
        match step:
            case Submit():
                self._submit(step)
            case Cancel(name) if request_id := self._alive(name):
                sim.core.queue.cancel(request_id)
                sim.hear()
                demand(request_id in sim.finished, f"{request_id} was cancelled and did not end")
            case Suspend(name) if request_id := self._alive(name):
                self._suspend(name, request_id)
            case StopReading(name) if request_id := self._alive(name):
                sim.stopped.add(request_id)
            case ReadOn(name) if request_id := self._alive(name):
                sim.read_on(request_id)
            case Wait(seconds):
                sim.now += seconds
            case Tick(n):
                sim.tick(n)
            case FailDecode(fault) if sim.core.recovery.is_over:
                # A second fault on the same rows would end their requests.
                what: Fault = RuntimeError("scripted") if fault == "raise" else fault
                sim.decoder.faults[sim.decoder.n_decodes + 1] = what
                sim.tick(2)
            case FailCall(method) if method != "set_loras" or sim.core.recovery.is_over:
                # `set_loras` belongs to a decode, so its failure counts as a fault of the rows: see above.
                calls = sim.decoder.n_calls
                sim.decoder.call_faults[method, calls[method] + 1] = RuntimeError("scripted")
                sim.tick(2)
            case ResetPrefixCache():
                sim.core.manager.cells.evict_all()

    def _submit(self, step: Submit) -> None:
        sim = self._sim
        params = _params(step.max_tokens, step.temperature, step.stop)
        prompt, media = tokens_of(step.prompt, sim.decoder.n_ctx_seq)
        lora_start = Spans.of(prompt).ceil(step.lora_start)
        self._ids[step.name] = sim.submit(
            prompt,
            params=params,
            priority=step.priority,
            timeout=step.timeout,
            tenant=step.tenant,
            lora=LoraUse(((step.lora, 1.0),), (), lora_start) if step.lora else NO_LORA,
            media=media,
        )

    def _suspend(self, name: str, request_id: str) -> None:
        sim = self._sim
        request = sim.requests[request_id]
        sim.core.queue.cancel(request_id, saves_state=True)
        sim.hear()
        ended = sim.finished[request_id]
        generated = (*request.generated_token_ids, *ended.completion.token_ids)
        self._ids[name] = sim.submit(
            request.prompt_token_ids,
            params=request.params,
            priority=request.priority,
            tenant=request.tenant,
            generated=generated,
            lora=request.lora,
            state=ended.state,
            media=request.media,
        )

    def _look(self) -> None:
        """Note which request must fail if the decode that begins puts NaN into its first output row."""
        sim = self._sim
        if sim.decoder.faults.get(sim.decoder.n_decodes + 1) == "nan":
            owners = {seq_id_of(s): s.request_id for s in sim.core.queue.running}
            outputs = [owners[run.seq_id] for run in sim.decoder.runs if run.n_outputs]
            self._doomed.update(outputs[:1])

    def finish(self) -> None:
        sim = self._sim
        sim.decoder.call_faults.clear()
        for request_id in set(sim.requests) - set(sim.finished):
            sim.read_on(request_id)
        sim.run(at_most=MAX_TICKS)
        sim.check_idle()
        sim.check_outcomes()
        expect(sorted(sim.failed()), sorted(self._doomed), "requests that failed")
        del sim.decoder.on_decode
