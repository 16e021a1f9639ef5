"""The pytest plugin in test suites of other people: each in a pytest of its own."""

from __future__ import annotations

from textwrap import dedent

import pytest

import _cllm_pytest

pytest_plugins = ["pytester"]

FAKE = """
import pytest
from cllm.testing import FakeEngine

pytestmark = pytest.mark.{mark}

@pytest.mark.cllm_fake_engine({{"1+1=": "2"}}, n_seq_max=2)
async def test_scripted(cllm_fake_engine):
    assert isinstance(cllm_fake_engine, FakeEngine)
    assert cllm_fake_engine.config.n_seq_max == 2
    assert (await cllm_fake_engine.generate("1+1=")).text == "2"

async def test_default(cllm_fake_engine):
    assert (await cllm_fake_engine.generate("x")).text == "x"
"""
REAL = """
import pytest

pytestmark = [pytest.mark.{mark}, pytest.mark.cllm_engine(n_ctx=512, n_seq_max=2)]

async def test_embedded(cllm_engine):
    assert cllm_engine.config.n_ctx == 512
    assert (await cllm_engine.generate("12+30=", temperature=0)).text == "42"

@pytest.mark.cllm_engine(n_ctx=1024)
async def test_the_closest_marker_decides(cllm_engine):
    assert (cllm_engine.config.n_ctx, cllm_engine.config.n_seq_max) == (1024, 2)
"""
BACKENDS = """
import pytest

@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param
"""
WITHOUT_ASYNCIO = ("-p", "no:asyncio")


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A directory for a test suite, and an environment that no variable of ours reaches."""
    monkeypatch.delenv("CLLM_AUDIT", raising=False)
    return pytester


def run(
    suite: pytest.Pytester,
    source: str,
    *arguments: str,
    ini: str = "",
    in_own_process: bool = False,
) -> pytest.RunResult:
    """Run a suite of one file, with every warning an error; in our process, for that is quick."""
    suite.makepyfile(test_theirs=source)
    if arguments[:2] != WITHOUT_ASYNCIO:
        ini = f"asyncio_default_fixture_loop_scope = function\n{ini}"
    suite.makeini(f"[pytest]\n{ini}")
    run_pytest = suite.runpytest_subprocess if in_own_process else suite.runpytest_inprocess
    return run_pytest("-q", "-W", "error", "-p", "no:cacheprovider", *arguments)


def check(result: pytest.RunResult, **outcomes: int) -> None:
    """These outcomes, no others, and the exit status that goes with them."""
    result.assert_outcomes(**outcomes)
    is_fine = outcomes.keys() == {"passed"}
    assert result.ret == (pytest.ExitCode.OK if is_fine else pytest.ExitCode.TESTS_FAILED)


@pytest.mark.parametrize("source", [FAKE, REAL], ids=["fake", "embedded"])
@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_pytest_asyncio_gets_an_engine_that_serves(
    suite: pytest.Pytester, source: str, mode: str
) -> None:
    check(run(suite, source.format(mark="asyncio"), f"--asyncio-mode={mode}"), passed=2)


@pytest.mark.parametrize("source", [FAKE, REAL], ids=["fake", "embedded"])
def test_anyio_gets_an_engine_on_both_event_loops(suite: pytest.Pytester, source: str) -> None:
    check(run(suite, BACKENDS + source.format(mark="anyio")), passed=4)


def test_anyio_alone_is_enough(suite: pytest.Pytester) -> None:
    check(run(suite, BACKENDS + FAKE.format(mark="anyio"), *WITHOUT_ASYNCIO), passed=4)


def test_a_test_without_an_event_loop_is_told(suite: pytest.Pytester) -> None:
    result = run(suite, "def test_sync(cllm_fake_engine): pass", *WITHOUT_ASYNCIO)
    check(result, errors=1)
    result.stdout.fnmatch_lines(["*test_sync needs an event loop for cllm_fake_engine: *"])


def test_the_engine_is_in_the_event_loop_of_its_test_whatever_that_is_shared_with(
    suite: pytest.Pytester,
) -> None:
    source = """
    import pytest

    async def answers(engine):
        assert (await engine.generate("1+1=", temperature=0)).text in ("2", "1+1=")

    @pytest.mark.asyncio
    async def test_as_the_ini_says(cllm_fake_engine, cllm_engine):
        await answers(cllm_fake_engine)
        await answers(cllm_engine)

    @pytest.mark.asyncio(loop_scope="function")
    async def test_alone(cllm_fake_engine):
        await answers(cllm_fake_engine)

    @pytest.mark.asyncio(loop_scope="module")
    async def test_of_the_module(cllm_fake_engine):
        await answers(cllm_fake_engine)

    @pytest.mark.asyncio(loop_scope="package")
    async def test_of_the_package(cllm_fake_engine):
        await answers(cllm_fake_engine)

    @pytest.mark.asyncio(loop_scope="class")
    class TestOfAClass:
        async def test_one(self, cllm_fake_engine):
            await answers(cllm_fake_engine)

        @pytest.mark.asyncio(loop_scope="session")
        async def test_other(self, cllm_fake_engine):
            await answers(cllm_fake_engine)
    """
    ini = "asyncio_default_test_loop_scope = session"
    check(run(suite, dedent(source), ini=ini), passed=6)


def test_what_markers_say_is_merged_and_the_closest_decides(suite: pytest.Pytester) -> None:
    source = """
    import pytest
    from cllm import EngineConfig

    WHOLE = EngineConfig(n_ctx=256, n_seq_max=3, n_batch=32)
    pytestmark = [
        pytest.mark.anyio,
        pytest.mark.cllm_engine(model="nowhere.gguf", n_ctx=512, n_batch=4),
        pytest.mark.cllm_fake_engine({"a": "b"}, n_ctx=512, latency_s=0.001),
    ]

    def settings(engine):
        config = engine.config
        return config.n_ctx, config.n_seq_max, config.n_batch

    @pytest.mark.cllm_engine(None, n_seq_max=4)
    async def test_an_option_leaves_the_others(cllm_engine):
        assert settings(cllm_engine) == (512, 4, 4)
        assert cllm_engine.config.n_threads == 1

    @pytest.mark.cllm_engine(config=WHOLE)
    async def test_a_config_replaces_them(cllm_engine):
        assert cllm_engine.config == WHOLE

    @pytest.mark.cllm_engine(config=WHOLE)
    class TestInside:
        @pytest.mark.cllm_engine(n_ctx=128)
        async def test_an_option_changes_an_outer_config(self, cllm_engine):
            assert settings(cllm_engine) == (128, 3, 32)

    @pytest.mark.cllm_fake_engine(answers={"a": "c"}, config=WHOLE)
    async def test_answers_are_no_setting(cllm_fake_engine):
        assert cllm_fake_engine.config == WHOLE
        assert (await cllm_fake_engine.generate("a")).text == "c"

    @pytest.mark.cllm_fake_engine(config=WHOLE)
    async def test_neither_is_latency(cllm_fake_engine):
        assert cllm_fake_engine.decoder.latency_s == 0.001
        assert (await cllm_fake_engine.generate("a")).text == "b"
    """
    backend = "\n@pytest.fixture\ndef anyio_backend():\n    return 'asyncio'\n"
    check(run(suite, dedent(source) + backend, *WITHOUT_ASYNCIO), passed=5)


def test_a_marker_that_cannot_be_followed_is_an_error_that_names_what_is_wrong(
    suite: pytest.Pytester,
) -> None:
    source = """
    import pytest

    pytestmark = pytest.mark.asyncio

    @pytest.mark.cllm_engine(config="small")
    async def test_config(cllm_engine): pass

    @pytest.mark.cllm_engine("one.gguf", model="other.gguf")
    async def test_model(cllm_engine): pass

    @pytest.mark.cllm_fake_engine("model.gguf")
    async def test_answers(cllm_fake_engine): pass

    @pytest.mark.cllm_engine(n_ctxx=512)
    async def test_option(cllm_engine): pass

    @pytest.mark.cllm_engine(n_ctx=-5)
    async def test_limit(cllm_engine): pass

    @pytest.mark.cllm_server([{"txt": "a"}])
    def test_rules(cllm_server): pass

    @pytest.mark.cllm_server(rule=[])
    def test_name(cllm_server): pass
    """
    result = run(suite, dedent(source), "-rN")
    check(result, errors=7)
    result.stdout.fnmatch_lines(
        [
            "@pytest.mark.cllm_engine: config is 'small', must be an EngineConfig*",
            "@pytest.mark.cllm_engine: multiple values for argument 'model'",
            "@pytest.mark.cllm_fake_engine: answers is 'model.gguf', must be a mapping*",
            "@pytest.mark.cllm_engine: unknown engine option 'n_ctxx'; did you mean 'n_ctx'?",
            "@pytest.mark.cllm_engine: n_ctx is -5, must be 0 to *",
            "@pytest.mark.cllm_server: rules[[]0].txt is 'a', must be called 'text'",
            "@pytest.mark.cllm_server: got an unexpected keyword argument 'rule'",
        ]
    )
    assert not [line for line in result.outlines if line.startswith((">", "E "))]


@pytest.mark.full
def test_a_failed_test_shows_its_own_lines_and_not_those_of_cllm(suite: pytest.Pytester) -> None:
    source = """
    import pytest

    @pytest.mark.anyio
    async def test_theirs(cllm_fake_engine):
        await cllm_fake_engine.generate("a", max_token=3)
    """
    for option, is_shown in (("-q", False), ("--full-trace", True)):
        result = run(suite, dedent(source), *WITHOUT_ASYNCIO, option, in_own_process=True)
        assert any("request_call.py" in line for line in result.outlines) == is_shown
        result.stdout.fnmatch_lines(
            [
                ">*max_token=3)",
                "E  *InvalidRequestError: max_token is 3, must be called 'max_tokens'",
            ]
        )


@pytest.mark.full
def test_books_that_disagree_fail_the_test_that_used_the_engine(suite: pytest.Pytester) -> None:
    source = """
    import pytest

    from cllm.engine.thread import inference_thread

    inference_thread.IDLE_AUDIT_S = float("inf")  # that of an idle engine would mend it first

    @pytest.mark.anyio
    async def test_theirs(cllm_fake_engine):
        await cllm_fake_engine.generate("x")
        cllm_fake_engine.decoder._held.clear()
    """
    result = run(suite, BACKENDS + dedent(source), in_own_process=True)
    check(result, passed=2, errors=2)
    result.stdout.fnmatch_lines(
        ["*AssertionError: the KV cache bookkeeping and llama.cpp disagree*"]
    )


def test_a_stream_that_is_left_open_fails_its_test_by_name(suite: pytest.Pytester) -> None:
    source = """
    import pytest

    KEPT = []

    @pytest.mark.anyio
    @pytest.mark.cllm_fake_engine(stream_buffer=1)
    async def test_theirs(cllm_fake_engine):
        KEPT.append(cllm_fake_engine.stream("x" * 9, request_id="forgotten"))
        await KEPT[-1].__anext__()

    @pytest.mark.anyio
    @pytest.mark.cllm_fake_engine(stream_buffer=1)
    async def test_cancelled(cllm_fake_engine):
        KEPT.append(cllm_fake_engine.stream("x" * 9))
        await KEPT[-1].__anext__()
        await KEPT[-1].cancel()
    """
    result = run(suite, BACKENDS + dedent(source))
    check(result, passed=4, errors=2)
    result.stdout.fnmatch_lines(["*a stream was left open: forgotten"])
    result.stdout.no_fnmatch_line("*ERROR*test_cancelled*")


def test_an_engine_that_is_stuck_in_a_decode_is_closed(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten minutes of latency, and nothing that is cancelled: the test would time out."""
    monkeypatch.setattr(_cllm_pytest, "TEARDOWN_S", 0.1)
    source = """
    import anyio
    import pytest

    KEPT = []

    @pytest.mark.anyio
    @pytest.mark.cllm_fake_engine(latency_s=600.0, stall_timeout_s=1e-3)
    async def test_theirs(cllm_fake_engine):
        KEPT.append(cllm_fake_engine.stream("x"))
        await KEPT[-1].__aenter__()
        while cllm_fake_engine.health().status != "stalled":
            await anyio.lowlevel.checkpoint()
    """
    check(run(suite, BACKENDS + dedent(source)), passed=2)


@pytest.mark.full
def test_a_suite_that_uses_no_engine_does_not_import_cllm(suite: pytest.Pytester) -> None:
    source = "import sys\ndef test_theirs(): assert 'cllm' not in sys.modules"
    check(run(suite, source, in_own_process=True), passed=1)


def test_a_failed_test_whose_errors_cause_each_other_is_reported(suite: pytest.Pytester) -> None:
    source = """
def test_it():
    try:
        raise KeyError("a")
    except KeyError as first:
        try:
            raise ValueError("b")
        except ValueError as second:
            other = second
        raise first from other
"""
    check(run(suite, source, in_own_process=True), failed=1)
