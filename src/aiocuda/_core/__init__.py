"""The core: operations and the queue of a stream, in the form that can be compiled. See README.md in this directory."""
