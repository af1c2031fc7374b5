"""States of training that live outside of the device: in host memory and on NVMe."""

from __future__ import annotations
