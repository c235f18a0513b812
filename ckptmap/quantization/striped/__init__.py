"""HQQ and quanto: a word holds one code of each of several stripes of rows. They are read only."""
