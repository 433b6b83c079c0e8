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

STEP = 76


def draw() -> str:
    """Return the picture."""
    height = 84 + STEP * len(QUESTIONS) + 62
    page = Page(
        "Which one do I need?",
        "Eight questions from top to bottom. A yes leads to an object at the right, a no to the next question, "
        "and the last no to a Stream.",
        height,
    )
    page.text(20, 56, "Ask from top to bottom. No GPU is needed to try any of them.", kind="note")
    for number, (question, name, purpose, colour) in enumerate(QUESTIONS):
        y = 72.0 + STEP * number
        page.box(20, y, 330, 54)
        for line, text in enumerate(question):
            page.text(185, y + 23 + 20 * line, text, anchor="middle")
        page.arrow((350, y + 27), (452, y + 27))
        page.text(398, y + 21, "yes", anchor="middle", kind="note")
        page.labelled(454, y, 246, 54, name, purpose, colour=colour)
        page.arrow((185, y + 54), (185, y + STEP))
        page.text(195, y + 70, "no", kind="note")
    y = 72.0 + STEP * len(QUESTIONS)
    page.labelled(20, y, 330, 54, "Stream", "operations in order; await the results", colour="green")
    page.text(370, y + 23, "Several results? asyncio.gather", kind="note")
    page.text(370, y + 43, "PyTorch, CuPy, numba? integrations", kind="note")
    return page.svg()
