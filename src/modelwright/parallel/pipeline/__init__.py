"""Pipeline parallelism: stages, schedules, partitioning and rebalancing of layers."""
