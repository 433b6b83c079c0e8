"""Clusters: replicas of a program's classes in processes of their own. See its README.md in the repository."""

from __future__ import annotations

from ..errors import DeadlineError, ReplicaLostError
from ._cluster import Cluster, ReplicaHandle
from ._messages import RemoteError
from ._open_cluster import open_cluster
from ._served_object import ReplicaInfo, current_replica
from ._statistics import ClusterStatistics, ReplicaStatistics

__all__ = [
    "Cluster", "ClusterStatistics", "DeadlineError", "RemoteError", "ReplicaHandle", "ReplicaInfo", "ReplicaLostError",
    "ReplicaStatistics", "current_replica", "open_cluster",
]  # fmt: skip
