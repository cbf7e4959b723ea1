"""What a run compiles to and what summing costs, before it runs. It may use `step`, `audit` and what they may use."""
