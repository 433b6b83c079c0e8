"""Which part of the library for which job: questions in the order in which to ask them."""

from __future__ import annotations

from .svg import Colour, Page

__all__ = ["QUESTIONS", "draw"]

#: The question, the object if the answer is yes, and its purpose.
QUESTIONS: tuple[tuple[tuple[str, str], str, str, Colour], ...] = (
    (
        ("Several GPUs, or must the program", "survive a device fault?"),
        "open_cluster",
        "a process for each GPU",
        "purple",
    ),
    (
        ("Do requests arrive one by one,", "for a model that is faster with many?"),
        "MicroBatcher",
        "batches of requests",
        "purple",
    ),
    (("Are samples read and decoded", "for a training loop?"), "DataLoader", "batches, loaded ahead", "purple"),
    (("Do many items take", "the same steps?"), "Pipeline", "the stages overlap", "blue"),
    (("More dependencies", "than you can check?"), "AsyncCoordinator", "finds them in arguments", "blue"),
    (("Hundreds of tasks", "and a few streams?"), "StreamPool", "lends streams", "teal"),
    (("A fixed set of streams", "that wait for each other?"), "StreamGroup", "lasting dependencies", "teal"),
    (("The same small kernels again,", "and the host is the limit?"), "Graph", "one launch for all of them", "teal"),
)

#: A phone shows it at nine tenths of its size.
WIDTH = 400
TOP = 90
STEP = 134


def draw() -> str:
    """Return the picture."""
    page = Page(
        "Which one do I need?",
        "Eight questions from top to bottom. A yes leads to an object below it, a no to the next question, "
        "and the last no to a Stream.",
        TOP + STEP * len(QUESTIONS) + 108,
        WIDTH,
    )
    page.text(20, 54, "Ask from top to bottom.", kind="note")
    page.text(20, 74, "No GPU is needed to try any of them.", kind="note")
    y = float(TOP)
    for question, name, purpose, colour in QUESTIONS:
        page.box(12, y, 376, 50)
        for line, text in enumerate(question):
            page.text(200, y + 21 + 20 * line, text, anchor="middle")
        page.arrow((240, y + 50), (240, y + 72))
        page.text(250, y + 66, "yes", kind="note")
        page.labelled(92, y + 72, 296, 48, name, purpose, colour=colour)
        page.arrow((46, y + 50), (46, y + STEP))
        page.text(56, y + 66, "no", kind="note")
        y += STEP
    page.labelled(12, y, 376, 50, "Stream", "operations in order; await the results", colour="green")
    page.text(12, y + 76, "Several results? asyncio.gather", kind="note")
    page.text(12, y + 96, "PyTorch, CuPy, numba? integrations", kind="note")
    return page.svg()
