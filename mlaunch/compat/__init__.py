"""Names of MegEngine, detectron2 and ColossalAI: their scripts port by changing an import line."""
