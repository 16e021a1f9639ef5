"""A download gives all of a model or nothing, and goes on where it has ended."""

from __future__ import annotations

import errno
import shutil
import socket
import sys
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, file_download, scan_cache_dir, try_to_load_from_cache

from cllm.errors import DownloadError
from cllm.hub.cache import (
    cached_files,
    cached_models,
    incomplete_files,
    remove_incomplete,
    remove_model,
)
from cllm.hub.download import find_model, find_projector, pull_model
from cllm.hub.names import ModelName
from tests.hub.conftest import FILES
from tests.hub.fake_hub import REPO, FakeHub, sha256_of

ONE, TWO = ModelName(REPO, "Q4_K_M"), ModelName(REPO, "Q8_0")
FILE = "model-Q4_K_M.gguf"
N_BYTES = len(FILES[FILE])


def in_cache(cache: Path) -> list[str]:
    """What there is of models."""
    return [path.name for path in cache.glob("models--*/blobs/*") if path.suffix != ".lock"]


def begun(cache: Path) -> Path:
    """The part of a download that was cut off."""
    part = cache / "models--user--model-GGUF" / "blobs" / f"{sha256_of(FILES[FILE])}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(FILES[FILE][:300_000])
    return part


def test_a_model_is_downloaded_once_and_found_from_then_on(hub: FakeHub) -> None:
    path = find_model(str(ONE))
    assert path.name == FILE
    assert path.read_bytes() == FILES[FILE]
    assert hub.n_sent == {FILE: N_BYTES}
    hub.asked.clear()
    assert find_model(f"hf:{REPO}") == path
    assert hub.asked == []


def test_all_parts_of_a_split_model_are_there_side_by_side(hub: FakeHub) -> None:
    path = find_model(str(TWO))
    assert path.name == "model-Q8_0-00001-of-00002.gguf"
    for name in list(FILES)[1:]:
        assert (path.parent / name).read_bytes() == FILES[name]


def test_a_pull_takes_what_is_new(hub: FakeHub) -> None:
    pull_model(ONE)
    hub.files[FILE] = b"newer" * 1000
    (path,) = pull_model(ONE)
    assert path.read_bytes() == hub.files[FILE]


def test_a_connection_that_is_cut_goes_on_where_it_was(hub: FakeHub) -> None:
    hub.cut_after = [300_000]
    (path,) = pull_model(ONE)
    assert path.read_bytes() == FILES[FILE]
    assert hub.n_sent[FILE] == N_BYTES
    assert [asked[2].get("Range") for asked in hub.asked if asked[0] == "GET"][1:] == [
        None,
        "bytes=300000-",
    ]


def test_what_was_interrupted_is_no_model_and_goes_on_the_next_time(
    hub: FakeHub, cache: Path
) -> None:
    hub.cut_after = [300_000] + [0] * 5
    with pytest.raises(DownloadError, match="go on from there"):
        pull_model(ONE)
    assert cached_files(ONE) is None
    assert cached_models() == []
    (part,) = incomplete_files()
    assert part.stat().st_size == 300_000
    hub.cut_after = []
    (path,) = pull_model(ONE)
    assert path.read_bytes() == FILES[FILE]
    assert hub.n_sent[FILE] == N_BYTES
    assert incomplete_files() == []


@pytest.mark.parametrize("sent", [bytes(N_BYTES), b"\1" + FILES[FILE][1:]])
def test_a_wrong_checksum_leaves_nothing(hub: FakeHub, cache: Path, sent: bytes) -> None:
    hub.sent[FILE] = sent
    with pytest.raises(DownloadError, match=f"checksum of {FILE} is {sha256_of(sent)}"):
        pull_model(ONE)
    assert in_cache(cache) == []
    assert cached_files(ONE) is None
    hub.sent.clear()
    (path,) = pull_model(ONE)
    assert path.read_bytes() == FILES[FILE]


def everything_under(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rfilename", "../../../../evil.gguf"),
        ("rfilename", "/tmp/evil.gguf"),
        ("rfilename", "a/../../../evil.gguf"),
        ("rfilename", "a//evil.gguf"),
        ("rfilename", "..\\evil.gguf"),
        ("rfilename", "\x1b[31m.gguf"),
        ("rfilename", "a\0b.gguf"),
        ("sha256", "../../../../evil"),
        ("sha256", "/tmp/evil"),
        ("sha256", ""),
        ("sha256", ".."),
        ("sha256", "A" * 64),
        ("sha256", "a" * 64 + "\n"),
        ("sha256", 5),
        ("sha", "../../../../evil"),
        ("sha", "/tmp/evil"),
        ("sha", ""),
        ("sha", None),
        ("size", -5),
        ("size", 0),
        ("size", 10**30),
        ("size", "x"),
        ("size", None),
    ],
)
def test_what_a_hub_says_becomes_no_path_and_no_size_unseen(
    hub: FakeHub, cache: Path, tmp_path: Path, field: str, value: object
) -> None:
    hub.listed[field] = value
    with pytest.raises(DownloadError, match=r"cannot be a name|hex digits|bytes|cannot be read"):
        pull_model(ModelName(REPO))
    assert hub.n_sent == {}
    assert everything_under(tmp_path) <= {"hub"}


def test_a_body_that_is_longer_than_announced_is_cut(hub: FakeHub, cache: Path) -> None:
    hub.listed["size"] = 100_000
    with pytest.raises(DownloadError, match="more than the 100000 bytes"):
        pull_model(ONE)
    assert all(path.stat().st_size <= 100_000 for path in cache.rglob("*") if path.is_file())


def test_a_file_system_without_links_gets_a_copy(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    (path,) = pull_model(ONE)
    assert path.read_bytes() == FILES[FILE]
    assert not path.is_symlink()


def test_threads_that_pull_one_model_at_once_get_it(hub: FakeHub) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(pull_model, [ONE] * 8))
    assert [path.read_bytes() for (path,) in found] == [FILES[FILE]] * 8
    assert hub.n_sent == {FILE: N_BYTES}
    (folder,) = {path.parent for (path,) in found}
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_huggingface_hub_finds_what_was_downloaded(hub: FakeHub) -> None:
    (path,) = pull_model(ONE)
    assert try_to_load_from_cache(REPO, FILE) == str(path)
    (repo,) = scan_cache_dir(constants.HF_HUB_CACHE).repos
    assert [(r.commit_hash, set(r.refs)) for r in repo.revisions] == [(hub.commit, {"main"})]


def test_a_part_that_is_longer_than_the_file_is_begun_anew(hub: FakeHub, cache: Path) -> None:
    blobs = cache / f"models--{REPO.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{sha256_of(FILES[FILE])}.incomplete").write_bytes(bytes(N_BYTES + 1))
    (path,) = pull_model(ONE)
    assert path.read_bytes() == FILES[FILE]


@pytest.mark.parametrize(
    ("statuses", "reason"),
    [
        ([(404, "RepoNotFound")], "no such repository"),
        ([(401, "")], "HF_TOKEN does not open it"),
        ([(403, "GatedRepo")], "accept its terms"),
        ([(500, "")] * 20, "status 500"),
    ],
)
def test_what_the_hub_refuses_is_said_in_words(
    hub: FakeHub, cache: Path, statuses: list[tuple[int, str]], reason: str
) -> None:
    hub.statuses = statuses
    with pytest.raises(DownloadError, match=reason) as error:
        find_model(str(ONE))
    assert hub.url not in str(error.value)
    assert in_cache(cache) == []


@pytest.mark.parametrize(
    ("proxy", "endpoint", "reason"),
    [
        ("socks5://secret@127.0.0.1:9", None, "a SOCKS proxy needs the package socksio"),
        ("socks4://secret@127.0.0.1:9", None, r"HF_ENDPOINT cannot be used \(ValueError\)"),
        (None, "http://secret@127.0.0.1:port", r"HF_ENDPOINT cannot be used \(InvalidURL\)"),
    ],
)
def test_an_address_that_cannot_be_used_is_named_by_its_setting(
    cache: Path,
    proxy: str | None,
    endpoint: str | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    huggingface_hub.close_session()
    monkeypatch.setitem(sys.modules, "socksio", None)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    if proxy is not None:
        monkeypatch.setenv("all_proxy", proxy)
    if endpoint is not None:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(DownloadError, match=reason) as error:
        find_model(str(ONE))
    assert "secret" not in str(error.value)
    huggingface_hub.close_session()


def test_a_hub_that_is_busy_is_asked_again(hub: FakeHub) -> None:
    pull_model(TWO)
    hub.asked.clear()
    find = file_download.http_get

    def busy(*arguments: Any, **options: Any) -> None:
        hub.statuses = [(429, "")]
        find(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_download, "http_get", busy)
        (path,) = pull_model(ONE)
    assert path.read_bytes() == FILES[FILE]


def test_a_quantization_that_is_not_there_is_answered_with_those_that_are(hub: FakeHub) -> None:
    with pytest.raises(DownloadError, match=f"{REPO} has no Q2_K, but Q4_K_M, Q8_0"):
        find_model(f"hf:{REPO}:Q2_K")


def test_offline_what_is_here_is_found_and_what_is_not_is_not_asked_for(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = find_model(str(ONE))
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_model(str(ONE)) == path
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE is set"):
        find_model(str(TWO))
    assert hub.asked == []


def test_a_disk_that_has_no_room_is_told_of_before_anything_is_asked_for(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(N_BYTES, 1, N_BYTES - 1))
    with pytest.raises(DownloadError, match=r"needs 0.0 GiB more, and the disk has 0.0"):
        pull_model(ONE)
    assert hub.n_sent == {}
    assert in_cache(cache) == []


def test_a_disk_that_gets_full_keeps_nothing_of_it(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fills_up(url: str, output: Any, **_: Any) -> None:
        output.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_download, "http_get", fills_up)
    with pytest.raises(DownloadError, match="the disk is full"):
        pull_model(ONE)
    assert in_cache(cache) == []


def test_a_token_goes_to_the_hub_and_into_no_message(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    token = "hf_" + "secret" * 5
    monkeypatch.setenv("HF_TOKEN", token)
    find_model(str(ONE))
    assert {asked[2].get("authorization") for asked in hub.asked} == {f"Bearer {token}"}
    hub.statuses = [(401, "")]
    with pytest.raises(DownloadError) as error:
        pull_model(TWO)
    said = "".join(capfd.readouterr()) + str(error.value)
    assert token not in said


def test_models_are_listed_and_removed_with_what_they_take(hub: FakeHub, cache: Path) -> None:
    pull_model(ONE)
    pull_model(TWO)
    one, two = cached_models()
    assert (one.name, two.name) == (ONE, TWO)
    assert [one.n_bytes, two.n_bytes] == [N_BYTES, sum(map(len, list(FILES.values())[1:]))]
    assert remove_model(two) == two.n_bytes
    assert cached_models() == [one]
    assert in_cache(cache) == [sha256_of(FILES[FILE])]
    assert cached_files(TWO) is None
    assert find_model(str(ONE)).read_bytes() == FILES[FILE]


def test_a_file_that_huggingface_hub_shares_between_repositories_stays(
    hub: FakeHub, cache: Path
) -> None:
    (path,) = pull_model(ONE)
    blob, shared = path.resolve(), cache / "blobs" / "01" / "0123"
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(f"../../blobs/01/{shared.name}")
    (model,) = cached_models()
    assert model.n_bytes == N_BYTES
    assert remove_model(model) == 0
    assert shared.read_bytes() == FILES[FILE]
    assert (in_cache(cache), cached_models()) == ([], [])


def test_a_new_commit_hides_no_model_that_is_here(hub: FakeHub) -> None:
    (old,) = pull_model(ONE)
    hub.files["another-F16.gguf"] = b"new"
    first, *_ = pull_model(TWO)
    assert old.parent != first.parent
    assert [model.name for model in cached_models()] == [ONE, TWO]
    hub.statuses = [(500, "")] * 9
    assert find_model(str(ONE)) == old
    assert [remove_model(model) > 0 for model in cached_models()] == [True, True]
    assert cached_models() == []


def test_a_projector_of_a_newer_version_is_found_without_the_hub(hub: FakeHub) -> None:
    pull_model(ONE)
    hub.files["mmproj-F16.gguf"] = b"projector"
    found = find_projector(str(ONE))
    assert found is not None
    hub.asked.clear()
    assert find_projector(str(ONE)) == found
    assert hub.asked == []


def test_a_model_is_removed_with_its_older_versions(hub: FakeHub, cache: Path) -> None:
    pull_model(ONE)
    hub.files[FILE] = b"newer" * 1000
    pull_model(ONE)
    (model,) = cached_models()
    assert model.n_bytes == 5000
    assert remove_model(model) == N_BYTES + 5000
    assert cached_models() == []
    assert in_cache(cache) == []


def test_an_update_that_ends_early_keeps_the_model_that_is_here(hub: FakeHub) -> None:
    before = pull_model(TWO)
    hub.files[before[0].name] = b"newer first part"
    hub.files[before[1].name] = b"newer second part"
    hub.sent[before[1].name] = b"damaged second part."
    with pytest.raises(DownloadError):
        pull_model(TWO)
    assert cached_files(TWO) == before


def test_a_file_that_was_cut_off_in_the_cache_is_downloaded_again(
    hub: FakeHub, cache: Path
) -> None:
    (path,) = pull_model(ONE)
    path.resolve().write_bytes(FILES[FILE][:10])
    assert pull_model(ONE) == [path]
    assert path.read_bytes() == FILES[FILE]
    assert in_cache(cache) == [sha256_of(FILES[FILE])]


def test_the_page_of_a_gateway_becomes_no_part_of_a_file(hub: FakeHub) -> None:
    hub.cut_after = [300_000]
    hub.statuses = []
    hub.sent[FILE] = b"<html>Please log in"
    with pytest.raises(DownloadError, match=r"the hub sent 19 bytes of model-Q4_K_M\.gguf"):
        pull_model(ONE)
    hub.sent.clear()
    hub.cut_after.clear()
    hub.n_sent.clear()
    (path,) = pull_model(ONE)
    assert path.read_bytes() == FILES[FILE]
    assert hub.n_sent[FILE] == N_BYTES


@pytest.mark.parametrize("n_page", [19, 400_000], ids=["short", "longer than the part"])
def test_the_page_of_a_gateway_does_not_take_the_place_of_the_part_that_is_here(
    hub: FakeHub, cache: Path, n_page: int
) -> None:
    part = begun(cache)
    before = part.read_bytes()
    hub.sent[FILE], hub.resumes = b"<html>".ljust(n_page), False
    with pytest.raises(DownloadError, match=rf"the hub sent {n_page} bytes of"):
        pull_model(ONE)
    assert part.read_bytes() == before
    hub.sent.clear()
    hub.resumes = True
    hub.n_sent.clear()
    (path,) = pull_model(ONE)
    assert path.read_bytes() == FILES[FILE]
    assert hub.n_sent[FILE] == N_BYTES - len(before)


def test_the_page_of_a_gateway_after_a_lost_connection_does_not_take_the_place_of_the_part(
    hub: FakeHub, cache: Path
) -> None:
    hub.cut_after, hub.resumes, hub.page_after_cut = [600_000], False, b"<html>"
    with pytest.raises(DownloadError, match="the hub sent 6 bytes of"):
        pull_model(ONE)
    (part,) = cache.glob("models--*/blobs/*.incomplete")
    assert part.read_bytes() == FILES[FILE][: part.stat().st_size] != b""
    assert not [*cache.glob("models--*/blobs/*.anew")]


def test_what_is_left_of_an_answer_that_began_anew_is_removed_by_the_next_download(
    hub: FakeHub, cache: Path
) -> None:
    part = begun(cache)
    part.with_name(f"{part.name}.anew").write_bytes(b"<html>")
    pull_model(ONE)
    assert not [*cache.glob("models--*/blobs/*.anew")]


def test_a_hub_that_cannot_resume_sends_the_whole_file(hub: FakeHub, cache: Path) -> None:
    begun(cache)
    hub.resumes = False
    (path,) = pull_model(ONE)
    assert path.read_bytes() == FILES[FILE]
    assert not [*cache.glob("models--*/blobs/*.anew")]


def test_a_hub_that_does_not_answer_is_an_error_in_time(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cllm.hub.download.LIST_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts connections
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(DownloadError, match="cannot be reached"):
            pull_model(ONE)
    huggingface_hub.close_session()


def test_a_part_that_is_being_downloaded_is_not_removed(hub: FakeHub) -> None:
    hub.stops_after = 300_000
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(pull_model, ONE)
        assert hub.has_stopped.wait(60)
        (part,) = incomplete_files()
        assert remove_incomplete(part) is None
        hub.stops_after = None
        hub.goes_on.set()
        (path,) = done.result(60)
    assert path.read_bytes() == FILES[FILE]


def test_a_part_of_another_program_is_not_pruned(cache: Path) -> None:
    blobs = cache / "models--user--model" / "blobs"
    blobs.mkdir(parents=True)
    own, other = (blobs / f"{'a' * 64}{part}.incomplete" for part in ("", ".0123abcd"))
    for path in (own, other):
        path.touch()
    assert incomplete_files() == [own]


def test_what_others_leave_in_the_cache_hides_no_model(hub: FakeHub, cache: Path) -> None:
    pull_model(ONE)
    (directory,) = cache.glob("models--*")
    (directory / "refs" / "main").write_bytes(b"\xff\xfe")
    (directory / "snapshots" / "dangling").symlink_to("nowhere")
    assert [model.name for model in cached_models()] == [ONE]
