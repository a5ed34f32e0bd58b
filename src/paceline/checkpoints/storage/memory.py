"""Checkpoints in the memory of this process: for runs that want to go on after a failure and keep nothing."""

from collections.abc import Sequence

from paceline.checkpoints.content.files import SourceFile
from paceline.checkpoints.storage.base import Draft, Fetched
from paceline.checkpoints.storage.workspace import Workspace, temporary_workspace

_Files = dict[str, bytes]


class MemoryStorage:
    """A `Storage` in the driver, which workers reach as they reach a folder that they do not see. `root` is only a
    name."""

    def __init__(self, root: str):
        self._root = root
        self._sets: dict[str, _Files] = {}
        self._drafts: dict[Draft, _Files] = {}
        self._is_claimed = False

    @property
    def root(self) -> str:
        return self._root

    def path_of(self, name: str) -> str:
        return f"{self._root}/{name}"

    def claim(self) -> None:
        if self._is_claimed or self._sets or self._drafts:
            raise FileExistsError(f"{self._root} is in use")
        self._is_claimed = True

    def names(self) -> list[str]:
        return list(self._sets)

    def read(self, name: str, file: str) -> bytes:
        return self._file(name, file)

    def read_range(self, source: str | Draft, file: str, offset: int, num_bytes: int) -> bytes:
        return self._file(source, file)[offset : offset + num_bytes]

    def fetch(self, source: str | Draft, files: Sequence[str]) -> Fetched:
        workspace = self.workspace()
        try:
            for file in files:
                target = workspace.path / "fetched" / file
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(self._file(source, file))
        except BaseException:
            workspace.close()
            raise
        return Fetched(workspace.path / "fetched", workspace.close)

    def put(self, draft: Draft, files: Sequence[SourceFile]) -> None:
        content = {file.name: _content(file) for file in files}
        self._drafts.setdefault(draft, {}).update(content)

    def folder_of(self, draft: Draft) -> str:
        return ""

    def commit(self, draft: Draft, manifest: SourceFile, files: Sequence[str]) -> None:
        if draft.name in self._sets:
            raise FileExistsError(f"{self.path_of(draft.name)} exists already")
        for file in files:
            self._file(draft, file)
        self._sets[draft.name] = {**self._drafts.get(draft, {}), manifest.name: _content(manifest)}
        self.discard(draft)

    def discard(self, draft: Draft) -> None:
        self._drafts.pop(draft, None)

    def sweep(self) -> None:
        self._drafts.clear()

    def delete(self, name: str) -> None:
        self._sets.pop(name, None)

    def workspace(self) -> Workspace:
        return temporary_workspace()

    def free_bytes(self) -> int | None:
        return None

    def _file(self, source: str | Draft, file: str) -> bytes:
        content = self._drafts.get(source) if isinstance(source, Draft) else self._sets.get(source)
        if content is None or file not in content:
            raise FileNotFoundError(f"{self._root}: {source} has no file {file}")
        return content[file]


def _content(file: SourceFile) -> bytes:
    return b"".join(bytes(chunk) for chunk in file.chunks())  # a chunk is good until the next one only
