"""The driver methods that work without a GPU, for the host driver and the simulated driver.

The methods submit commands to the state machine of `rules`. A driver adds the engines that execute the commands
(threads or a virtual clock), the notifiers, and the worker threads.

=================================  =====================================================================
``core``                           `Core`: shared state, the fault latch, methods about devices
``streams, memory, code, graphs``  the other methods of `aiocuda.driver.protocol`, each a subclass of `Core`
``recorded``                       work with the record of an event after it, as one call
``work``                           the work of an engine for one command
``replay``                         the launch of a graph as commands of streams
``model``                          the figures: bandwidth, latency, memory
``rules``                          CUDA's ordering rules as a state machine
=================================  =====================================================================
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
