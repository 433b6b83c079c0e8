"""The drivers: the only way from this library to a device. See README.md in this directory."""
