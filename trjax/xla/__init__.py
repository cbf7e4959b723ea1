"""All that knows XLA: HLO text, options, absent devices, dumps. It may use `mesh`, `cost` and the leaves."""
