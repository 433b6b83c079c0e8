"""The driver methods that work without a GPU, for the host driver and the simulated driver.

The methods submit commands to the state machine of `rules`. A driver adds the engines that execute the commands
(threads or a virtual clock), the notifiers, and the worker threads.

`README.md` of the folder above lists the files.
"""

from __future__ import annotations

from ._code import Code
from ._core import Core
from ._graphs import Graphs
from ._memory import Memory
from ._model import Model
from ._recorded import Recorded
from ._streams import Streams

__all__ = ["Code", "Core", "Graphs", "Memory", "Model", "Recorded", "Streams"]
