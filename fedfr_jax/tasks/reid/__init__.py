"""Person re-identification: find a person again whom another camera saw."""
