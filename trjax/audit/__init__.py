"""What any compiled program does: timeline, report, rules. It may use `xla`, `cost` and the leaves, no trainer."""
