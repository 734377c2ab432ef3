"""Other libraries' names: MegEngine's, detectron2's and ColossalAI's, so that their scripts port by an import line."""
