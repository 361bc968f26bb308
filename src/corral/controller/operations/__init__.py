"""Operations: long-running work that users start, watch, cancel and retry."""
