"""What a command says of a mistake: one line, before anything is claimed or trained."""

import errno

import pytest

from fedfr_jax.cli import flags
from fedfr_jax.cli.main import main
from fedfr_jax.federated import algorithms


def test_what_fits_neither_memory_nor_disk_is_one_line(monkeypatch, capsys):
    def fails(*_):
        raise error

    monkeypatch.delenv("FEDFR_DEBUG", raising=False)
    monkeypatch.setattr(flags, "run", fails)
    error = MemoryError("lanes must fit the device's memory, got 64.")
    assert main(["train"]) == 2
    says = capsys.readouterr().err.splitlines()
    assert says[0] == "lanes must fit the device's memory, got 64." and len(says) == 2
    error = MemoryError()  # Python's own says nothing
    assert main(["train"]) == 2
    assert capsys.readouterr().err.startswith("MemoryError\n")
    error = AttributeError("'Stream' has no 'pos'")  # what a plot makes of a full disk
    error.__context__ = OSError(errno.ENOSPC, "No space left on device", "a.pdf")
    assert main(["train"]) == 75
    says = capsys.readouterr().err.splitlines()
    assert "device: 'a.pdf': make room and start" in says[0] and len(says) == 2
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", "a.npz")
    assert main(["train"]) == 2
    says = capsys.readouterr().err.splitlines()
    assert says[0] == "a.npz must be there, got no such file or folder."
    error = AttributeError("a mistake of ours")
    with pytest.raises(AttributeError):
        main(["train"])


COMMANDS = """\
nosuch -> command must be one of ['bench', 'completion', 'configs'
train --config=configs/none.py -> --config must be one of
train --config=CONFIG -> needs --workdir=DIR
train --config=CONFIG --nosuch=1 -> flags must be among
train --config=CONFIG --profile=3 -> --profile: must be A:B with 1 <= A <= B, got '3'
train --config=CONFIG --workdir=W --process_id=1 -> process_id must all be set
launch --num_hosts=2 train -> --num_hosts needs --coordinator=HOST
train --config CONFIG --workdir=W --config.modle.depth=3 -> (did you mean model?)
train --config=CONFIG --workdir=W --method=fedfr -> (did you mean --methods?)
prepare --config=CONFIG --checksums -> needs a packed data set: add --pack=FOLDER
prepare --config=CONFIG --config.data.name=fei -> config.data must have
prepare --config=CONFIG --config.data.path=nosuch.npz -> nosuch.npz
convert --input=nosuch.pth --output=a.npz -> nosuch.pth must be there, got no such file
"""


@pytest.mark.parametrize("line", COMMANDS.splitlines(), ids=lambda line: line[:40])
def test_a_mistake_is_one_clear_line(config, line, capsys, tmp_path):
    command, _, message = line.partition(" -> ")
    command = command.replace("CONFIG", str(config))
    code = main(command.replace("=W", f"={tmp_path / 'run'}").split())
    printed = capsys.readouterr()
    assert code == 2 and message in printed.err + printed.out
    assert len(printed.err.strip().splitlines()) <= 3  # two mistakes, and a hint


MISTAKES = """\
model.width=3 -> got 'width' (did you mean widths?)
model.widths=(65536,65536) -> must have arrays of fewer than 2**31 elements
model.dtype=x -> config.model.dtype must be None or the name of a floating
methods.fedfr.x=1 -> config.methods.fedfr must have keys of [
methods.fedfr.algorithm={'name':'fedfr','contrastive_temperature':1e-320} -> in float32
methods={1:{}} -> config.methods must have string keys without dots, got 1.
methods={'a':{'b.c':{}}} -> config.methods.a must have string keys without dots
methods={'x':{'algorithm':'fedavg','init_per_client':''}} -> must be true or false
federation.rounds=2.5 -> config.federation.rounds must be a whole number, got 2.5
federation.cohort_size=9 -> federation: cohort_size must be at most 3, the number of
federation.augment=[{'name':'random_erasing','fill':b'x'}] -> [0].fill must be a string
federation.augment=[{'name':'random_erasing','fill':-1}] -> fill must be in [0, 255]
federation.model_shards=9 -> mesh clients x model must fit 8 devices
federation.local_epochs=2147483647 -> of the largest client must be below 2**31, got
pretrain.warmup_fraction=1 -> must leave at least one of the 18 steps
pretrain.init=1 -> config.pretrain.init: weights must be a file with suf
pretrain.augment=({'name':'normalize','std':(1.,2.)},) -> must normalize images as
pretrain.loss={'margin':-1.0} -> config.pretrain.loss.margin must be at least 0
evaluation.fars=(2.0,) -> config.evaluation.fars must be in (0, 1), got (2.0
evaluation.pairs='\\0' -> must be a string without null characters, a
partition.num_clients=1000000000000 -> partition.num_clients must be below 2**31
"""
MISTAKES += f"federation.rounds={20_000 * '-'} -> must be a whole number, got '---"


@pytest.mark.parametrize("line", MISTAKES.splitlines(), ids=lambda line: line[:40])
def test_a_wrong_setting_is_one_line_and_claims_no_folder(
    config, line, capsys, tmp_path
):
    setting, _, message = line.partition(" -> ")
    words = ["train", f"--config={config}", f"--workdir={tmp_path / 'run'}"]
    assert main([*words, f"--config.{setting}"]) == 2
    text = capsys.readouterr().err
    assert message in text and len(text.splitlines()) == 2
    assert not (tmp_path / "run").exists()


def test_a_batch_that_no_client_fills_is_refused(config, capsys, tmp_path):
    words = ["train", f"--config={config}", f"--workdir={tmp_path / 'run'}"]
    words += ["--config.federation.drop_last=True", "--config.federation.batch_size=64"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "config.federation.batch_size must be at most the examples of the" in said
    assert not (tmp_path / "run").exists()


MINE = '''"""A config with an algorithm of its own."""

import fedfr_jax as ff
from fedfr_jax.configs import base


def mine(training, *, num_clients, momentum=0.9):
    raise ValueError(f"momentum {momentum}, {num_clients} clients")


ff.register_algorithm("takes_facts", mine)


def get_config():
    config = base.get_config()
    config.task = "classification"
    config.data = {"name": "fake_data", "num_identities": 4, "image_size": 8}
    config.partition = {"name": "iid", "num_clients": 3}
    config.model = {"name": "mlp", "hidden_dim": 8}
    config.federation = {"rounds": 1, "local_epochs": 1, "batch_size": 4}
    method = {"algorithm": {"name": "takes_facts"}, "momentum": 0.5}
    config.methods = {"mine": {**method, "learning_rate": 0.1}}
    return config
'''


def test_a_registered_algorithm_keeps_its_own_momentum(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(MINE)
    words = ["train", f"--config={tmp_path}/mine.py", f"--workdir={tmp_path}/run"]
    own = "--config.methods.mine.algorithm"
    try:
        for flags, expected in (
            ([], "momentum 0.9, 3 clients"),
            ([f"{own}.momentum=0.2"], "momentum 0.2, 3 clients"),
            (
                [f"{own}.num_clients=2"],
                "config.methods.mine.algorithm must not set num_clients, which "
                "takes_facts takes from the task, got 2. Remove it.",
            ),
        ):
            assert main([*words, *flags]) == 2
            error = capsys.readouterr().err
            assert expected in error, error
    finally:
        algorithms.ALGORITHMS.pop("takes_facts", None)
