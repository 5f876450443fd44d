"""Save on any number of ranks, read back on any other: the ranks are threads of this process."""

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dtrain.checkpoint import CheckpointReader, NoCheckpointError, ReadTarget, Retention, Snapshot, open_newest, save
from dtrain.checkpoint.directory import make_directories, remove_tree
from dtrain.checkpoint.snapshot import TensorShard
from dtrain.checkpoint.storage import make_directory
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.errors import CheckpointError
from tests.helpers import checkpoints
from tests.helpers.checkpoints import ALONE, assert_holds, make_tensors, on_threads, save_good, shard, shards_of


@pytest.mark.parametrize(("saved", "loaded"), [(1, 4), (3, 1), (2, 2)])
def test_any_world_size_loads_any_other(tmp_path: Path, saved: int, loaded: int) -> None:
    path = save_good(tmp_path / "run" / "checkpoints", 40, saved)
    tensors = make_tensors(40)
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", *(f"r000{r}.safetensors" for r in range(saved))]

    def load(comm: Communicator) -> CheckpointReader:
        reader = open_newest(tmp_path / "run", comm)
        loaded_shards = []
        for held in shards_of(tensors, comm.rank, loaded):
            data = reader.read(held.kind, held.name, held.start, held.stop)
            assert torch.equal(data, held.data)
            loaded_shards.append(TensorShard(held.name, held.kind, held.shape, held.dtype, held.start, held.stop, data))
        reader.check_fingerprints(loaded_shards, comm)
        return reader

    for reader in on_threads(loaded, load):
        assert (reader.step, reader.path) == (40, path)
        assert reader.state == {"world_size": saved, "extra": {"step": 40}}
        assert_holds(reader, tensors)


def test_several_shards_of_one_tensor_on_one_rank(tmp_path: Path) -> None:
    tensor = torch.arange(10.0)
    keys = [("master", "w"), ("master", "w@4")]  # a name that looks like the key of the other's second shard
    shards = tuple(shard(key, tensor, a, b) for key in keys for a, b in [(4, 10), (0, 4)])
    path = save(tmp_path, Snapshot(1, shards, {}), ALONE)
    reader = open_newest(tmp_path, ALONE)
    for _, name in keys:
        assert torch.equal(reader.read("master", name), tensor)
        assert torch.equal(reader.read("master", name, 3, 6), tensor[3:6])
    assert len(load_file(path / "r0000.safetensors")) == 4


def test_shards_longer_than_a_block_and_every_dtype(tmp_path: Path) -> None:
    names = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint64 uint8 complex64"
    raw = torch.randint(0, 255, (8 * 99,), dtype=torch.uint8)
    tensors = {("buffer", name): raw.view(getattr(torch, name)) for name in names.split()}
    tensors["master", "long"] = torch.randn(3_000_001)
    shards = tuple(shard(key, tensor, 0, tensor.numel()) for key, tensor in tensors.items())
    save(tmp_path, Snapshot(1, shards, {}), ALONE)
    reader = open_newest(tmp_path, ALONE)
    for (kind, name), tensor in tensors.items():
        assert torch.equal(reader.read(kind, name).view(torch.uint8), tensor.view(torch.uint8))
    assert torch.equal(reader.read("master", "long", 2_999_990), tensors["master", "long"][2_999_990:])


def test_each_block_of_a_save_or_load_is_progress(tmp_path: Path) -> None:
    """So a slow disk is no hang."""
    changes = []
    for step, numel in ((1, 10), (2, 3_000_001)):  # one block, and three
        comm = SingleRank(torch.device("cpu"))
        tensors = {("master", "w"): torch.zeros(numel)}
        save(tmp_path / str(numel), Snapshot(step, shards_of(tensors, 0, 1), {}), comm)
        saved = comm.schedule.progress.num_changes
        open_newest(tmp_path / str(numel), comm)
        changes.append((saved, comm.schedule.progress.num_changes - saved))
    assert [more - few for few, more in zip(*changes, strict=True)] == [2, 2]


def test_safetensors_library_reads_our_files(tmp_path: Path) -> None:
    whole = load_file(save_good(tmp_path / "whole", 1, 1) / "r0000.safetensors")
    tensors = {f"{kind}:{name}": tensor for (kind, name), tensor in make_tensors(1).items() if tensor.numel()}
    assert whole.keys() == tensors.keys()
    assert all(torch.equal(whole[key], tensors[key]) for key in tensors)  # in their shape, as one rank holds all


def test_empty_ranks_and_a_checkpoint_without_tensors(tmp_path: Path) -> None:
    tensor = torch.arange(3.0)
    held = {("buffer", "b"): tensor}
    on_threads(4, lambda comm: save(tmp_path, Snapshot(1, shards_of(held, comm.rank, 4), {}), comm))
    assert torch.equal(open_newest(tmp_path, ALONE).read("buffer", "b"), tensor)
    save(tmp_path, Snapshot(2, (), {"extra": "only state"}), ALONE)
    assert open_newest(tmp_path, ALONE).state == {"extra": "only state"}


def test_only_the_first_ranks_write_files(tmp_path: Path) -> None:
    tensors = make_tensors(10)

    def work(comm: Communicator, step: int, shards_from: int) -> Path:
        shards = shards_of(tensors, comm.rank % 2, 2) if comm.rank < shards_from else ()
        return save(tmp_path, Snapshot(step, shards, {}, num_files=2), comm)

    paths = on_threads(6, lambda comm: work(comm, 10, shards_from=2))
    assert [path.name for path in paths] == ["step-00000010"] * 6
    assert sorted(p.name for p in paths[0].iterdir()) == ["manifest.json", "r0000.safetensors", "r0001.safetensors"]
    assert_holds(open_newest(tmp_path, ALONE), tensors)
    for error in on_threads(6, lambda comm: work(comm, 20, shards_from=3)):
        assert "failed on rank 2: it has shards, and only the first 2 ranks write files" in str(error)


def test_a_link_is_removed_and_not_followed(tmp_path: Path) -> None:
    """Neither inside a directory nor in its place."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_text("keep")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "inner").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "top").symlink_to(tmp_path / "elsewhere")
    remove_tree(tmp_path / "tree")
    remove_tree(tmp_path / "top")
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    assert (tmp_path / "elsewhere" / "mine").read_text() == "keep"


def test_a_directory_that_another_job_removes_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other job creates it just before this one, and removes it and its parent before this one looks."""
    monkeypatch.setattr("dtrain.checkpoint.shared_folder.LIMIT_S", 0.5)
    path = tmp_path / "run" / "checkpoints"
    waits: list[int] = []

    def make_late(created: Path) -> None:
        if created == path and not waits:
            path.parent.rmdir()
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        make_directory(created)

    monkeypatch.setattr("dtrain.checkpoint.storage.make_directory", make_late)
    make_directories(path, lambda: waits.append(1))
    assert path.is_dir()
    assert waits == [1]


def test_a_file_in_the_way_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(NotADirectoryError, match="run"):
        make_directories(tmp_path / "run" / "checkpoints")


def test_big_steps_sort_as_numbers_and_no_fadvise_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.posix_fadvise")
    save_good(tmp_path, 99_999_999, 1)
    assert save_good(tmp_path, 100_000_000, 1).name == "step-100000000"
    assert open_newest(tmp_path, ALONE).step == 100_000_000


def test_good_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    path = save_good(tmp_path, 10)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    for error in checkpoints.save_threads(tmp_path, 10, seed=77):
        assert isinstance(error, CheckpointError)
        assert "step-00000010 exists and verifies; a run that resumes from an older step needs a" in str(error)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000010"]


def test_a_damaged_checkpoint_gives_way_to_a_new_one_of_its_step(tmp_path: Path) -> None:
    path = save_good(tmp_path, 10)
    (path / "r0001.safetensors").write_bytes(b"")
    save_good(tmp_path, 10)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad-step-00000010-size", "step-00000010"]
    assert_holds(open_newest(tmp_path, ALONE), make_tensors(10))


def test_shards_that_do_not_tile_are_refused(tmp_path: Path) -> None:
    save_good(tmp_path, 1)

    def work(comm: Communicator) -> Path:
        held = (shard(("master", "w"), torch.zeros(5, 7), *((0, 10), (20, 35))[comm.rank]),)
        return save(tmp_path, Snapshot(2, held, {}), comm)

    message = "master:w: no rank or file holds elements 10 to 20 (between rank 0 and rank 1)"
    for error in on_threads(2, work):
        assert str(error) == f"saving {tmp_path}/step-00000002 failed on rank 0: {message}"
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_ranks_that_disagree_are_named(tmp_path: Path) -> None:
    def work(comm: Communicator) -> Path:
        tensor = torch.zeros(8) if comm.rank == 0 else torch.zeros(2, 4)
        held = (shard(("master", "w"), tensor, 4 * comm.rank, 4 * comm.rank + 4),)
        return save(tmp_path, Snapshot(2, held, {}), comm)

    for error in on_threads(2, work):
        assert "master:w is F32 [8] on rank 0 but F32 [2, 4] on rank 1; the ranks' models differ" in str(error)
    for error in on_threads(3, lambda comm: save(tmp_path, Snapshot(5 + (comm.rank == 2), (), {}), comm)):
        assert "failed on rank 2: it saves step 6, rank 0 saves step 5" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_bad_state_and_bad_options_fail_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 0: state\['loss'\] is nan"):
        save(tmp_path / "a", Snapshot(1, (), {"loss": float("nan")}), ALONE)
    with pytest.raises(CheckpointError, match="got -1"):
        save(tmp_path / "a", Snapshot(-1, (), {}), ALONE)
    with pytest.raises(CheckpointError, match="keep_last=0"):
        save(tmp_path / "a", Snapshot(1, (), {}), ALONE, retention=Retention(keep_last=0))
    assert list(tmp_path.iterdir()) == []


def test_no_checkpoint_differs_from_none_that_verifies(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        for error in on_threads(2, lambda comm, path=path: open_newest(path, comm)):
            assert isinstance(error, NoCheckpointError)
    path = save_good(tmp_path, 1)
    (path / "manifest.json").unlink()
    for text in ("step-00000001: manifest.json: missing", "bad-step-00000001-missing"):  # then it is quarantined
        with pytest.raises(CheckpointError, match=f"no checkpoint in .* verifies .{text}") as error:
            open_newest(tmp_path, ALONE)
        assert not isinstance(error.value, NoCheckpointError)


def test_requested_checkpoint_is_used_or_refused_without_fallback(tmp_path: Path) -> None:
    for step in (10, 20):
        save_good(tmp_path, step)
    assert open_newest(tmp_path / "step-00000010", ALONE).step == 10
    (tmp_path / "step-00000010").rename(tmp_path / "best")  # a committed directory may be copied under any other name
    assert open_newest(tmp_path / "best", ALONE).step == 10
    (tmp_path / "best" / "r0001.safetensors").unlink()
    (tmp_path / "best").rename(tmp_path / "step-00000010")
    for error in on_threads(2, lambda comm: open_newest(tmp_path / "step-00000010", comm)):
        assert "step-00000010 cannot be used: r0001.safetensors: missing; name another one" in str(error)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]
    with pytest.raises(CheckpointError, match="No such file or directory"):
        open_newest(tmp_path / "step-00000030", ALONE)
    (tmp_path / "step-00000020").rename(tmp_path / "step-00000020.tmp-ab12cd34")
    with pytest.raises(CheckpointError, match="a save that never finished"):
        open_newest(tmp_path / "step-00000020.tmp-ab12cd34", ALONE)


def test_reads_outside_the_tensors_are_refused(tmp_path: Path) -> None:
    save_good(tmp_path, 1)
    reader = open_newest(tmp_path, ALONE)
    with pytest.raises(CheckpointError, match="holds no master:weigth; did you mean 'weight'"):
        reader.read("master", "weigth")
    with pytest.raises(CheckpointError, match=r"\[20, 60\) is not an interval of master:weight"):
        reader.read_into([ReadTarget("master", "weight", 20, torch.zeros(40))])
    for start, stop in ((-1, 3), (3, 2), (0, 36)):
        with pytest.raises(CheckpointError, match=r"is not an interval of master:weight \(35 elements\)"):
            reader.read("master", "weight", start, stop)
    reader.require_kinds(["master", "exp_avg", "exp_avg_sq", "buffer", "frozen"])
    with pytest.raises(CheckpointError, match="holds frozen:none, of a kind that this run does not know"):
        reader.require_kinds(["master", "exp_avg", "exp_avg_sq", "buffer"])


def test_file_that_changes_after_it_was_verified(tmp_path: Path) -> None:
    path = save_good(tmp_path, 1)
    reader = open_newest(tmp_path, ALONE)
    (path / "r0001.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"r0001.safetensors changed while it was read: size differs"):
        reader.read("master", "weight")


def test_fingerprints_detect_wrongly_loaded_values(tmp_path: Path) -> None:
    save_good(tmp_path, 1)
    tensors = make_tensors(1)

    def check(world: int, change: object) -> list[object]:
        def work(comm: Communicator) -> None:
            held = list(shards_of(tensors, comm.rank, world))
            if comm.rank == world - 1:
                change(held)  # type: ignore[operator]
            open_newest(tmp_path, comm).check_fingerprints(held, comm)

        return on_threads(world, work)

    def flip(held: list[TensorShard]) -> None:
        held[1].data.view(torch.int32)[0] ^= 1

    def swap_moments(held: list[TensorShard]) -> None:
        one = held[1].data.clone()
        held[1].data.copy_(held[2].data)
        held[2].data.copy_(one)

    def narrow(held: list[TensorShard]) -> None:
        a = held[0]
        held[0] = TensorShard(a.name, a.kind, a.shape, torch.float16, a.start, a.stop, a.data.half())

    assert check(1, lambda held: None) == [None]
    assert check(3, lambda held: None) == [None] * 3
    # moments may be left out as a kind (an evaluation needs none), but not one of them
    assert check(1, lambda held: held.__setitem__(slice(None), [p for p in held if p.kind == "master"])) == [None]
    cases = [
        (flip, "exp_avg:weight differs from what was saved"),
        (swap_moments, "exp_avg:weight differs from what was saved"),
        (narrow, "master:weight was saved as torch.float32 [5, 7], and is now torch.float16 [5, 7]"),
        (lambda held: held.pop(0), "master:weight: no rank or file holds elements"),
        (lambda held: held.append(held[0]), "master:weight: both rank 1 and rank 1 hold"),
        (lambda held: held.append(shard(("master", "new"), torch.zeros(2), 0, 2)), "holds no master:new"),
    ]
    for change, message in cases:
        errors = check(2, change)
        assert all(isinstance(error, CheckpointError) and message in str(error) for error in errors), (message, errors)
