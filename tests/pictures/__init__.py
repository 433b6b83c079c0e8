"""The pictures of README and of the documentation. ``python -m tests.pictures [NAME…]`` draws them again.

Most pictures show a real run on the host driver, so their times differ from run to run. Those with ``is_fixed`` in
`tests.pictures.table` are drawn from files of the repository; a test compares them with the committed pictures.
"""
