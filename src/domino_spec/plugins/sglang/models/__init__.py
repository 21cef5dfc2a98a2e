"""Models for SGLang's registry: it takes the `EntryClass` of each module here."""
