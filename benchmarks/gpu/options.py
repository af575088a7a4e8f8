"""Options of a run."""

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.measuring.setting import Setting
from benchmarks.measuring import results

#: Seconds that a run may take.
WHOLE = 480.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options from the command line."""

    quick: bool = False
    dry: bool = False
    #: Processes of a dry run, in which nothing is timed.
    processes: int = 1
    only: tuple[str, ...] = ()
    #: Seconds of the whole run.
    seconds: float = WHOLE
    #: Folder of the results in addition to $OUT, or None.
    folder: Path | None = results.FOLDER
    commit: str = ""

    @property
    def worthless(self) -> bool:
        """True if no GPU measures anything."""
        return self.dry or self.setting.hollow

    @property
    def words(self) -> list[str]:
        """Words of the results' file names that tell runs with different options apart."""
        chosen = {"dry": self.worthless, "quick": self.quick}
        return [*(word for word, true in chosen.items() if true), *dict.fromkeys(self.only)]

    @property
    def setting(self) -> Setting:
        cuda = torch.cuda.is_available() and not self.dry
        return Setting(device=torch.device("cuda" if cuda else "cpu"), toy=self.dry, quick=self.quick)
