"""The main job on a real model: the same answers, with and without drafts."""
