"""What TensorBoard is given to read, while a run goes on."""

import os

import tensorboardX  # noqa: F401 - which sets a variable when it is imported: before a test, which must leave none

from paceline.cli.tensorboard_page import _place, _Shown
from paceline.runs import RunFolder, load_run


def files(place):
    return sorted(str(path.relative_to(place)) for path in place.rglob("*") if not path.is_dir())


def test_reports_until_the_run_writes_files_of_its_own(tmp_path):
    place = _place(tmp_path / "board", "digits/run_001")
    (tmp_path / "secret.tfevents").write_text("secret")
    with RunFolder.create(tmp_path / "digits") as folder:
        shown = _Shown(place, load_run(folder.path))
        shown.update()
        folder.record_step(1, 0, [{"loss": 0.5}])
        folder.beat()
        shown.update()
        [mirror] = files(place)
        (folder.path / "tb").mkdir()
        (folder.path / "tb" / "events.out.tfevents.1").write_text("theirs")
        (folder.path / "tb" / "events.out.tfevents.2").symlink_to(tmp_path / "secret.tfevents")
        os.mkfifo(folder.path / "events.out.tfevents.3")
        shown.update()
        (folder.path / "tb" / "events.out.tfevents.4").write_text("of a resumed run")
        shown.update()
        shown.close()
    assert files(place) == sorted([mirror, "tb/events.out.tfevents.1", "tb/events.out.tfevents.4"])
    assert (place / "tb/events.out.tfevents.4").read_text() == "of a resumed run"


def test_names_never_meet_and_stay_inside(tmp_path):
    names = ["a b/run_001", "a_b/run_001", "../../etc/x", "/", ".."]
    places = [_place(tmp_path, name) for name in names]
    assert len({*places}) == len(names)
    assert all(place.resolve().is_relative_to(tmp_path) and place.resolve() != tmp_path for place in places)
