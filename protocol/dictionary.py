"""The preset dictionary of the codec `zlib-dict`: the words that messages are made of.

Most packs are shorter than these words, which zlib may refer to as if they stood before the payload
(RFC 1950, FDICT; docs/protocol.md, "The dictionary"). What is most common stands last. It never
changes: what was written with it must be read for ever. A better one would be another codec.
"""

from __future__ import annotations

DICTIONARY = (
    b'{"path":"stages.toml","size":,"mode":420,"sha256":"'
    b'{"type":"hello","host":"","version":"0.1.0","time":1,"inherits":{}}]'
    b'{"type":"bridge","url":"https://'
    b'{"type":"stored","objects":["w-000001-'
    b'{"type":"drop","path":"in/artifacts/'
    b'{"type":"put","path":"store/checkpoints/","size":,"mode":420,"sha256":"'
    b'{"type":"snapshot","order":1,"id":"","blob":1'
    b'{"type":"command","number":1,"line":"run:","run_id":".0001.","snapshot":1,"error":"",'
    b'"unsealed":false}'
    b'{"type":"run","record":{"run_id":"","stage":"","line":"run:","result":"success",'
    b'"cause":"exit 0","exit_code":0,"signal":null,"attempts":1,"started":1,"ended":1,'
    b'"snapshot":1,"after":{},"report":null}}'
    b'{"type":"journal","record":{"number":1,"line":"run:","state":"claimed","time":1,'
    b'"worker":"w-000001-","run_id":"","attempt":0,"snapshot":1,"result":null,"cause":"",'
    b'"exit_code":null,"signal":null,"started":null}}'
    b'"state":"started","state":"ended","result":"success"'
    b'{"type":"content","sha256":"","size":,"pieces":[{"object":"c-000001-/000000000001-chunk-",'
    b'"offset":0,"length":1}],"blob":0},'
    b"\n[syncd] start .0001. attempt 1 at 20-01T00:00:00Z: python "
    b"[syncd] end .0001. attempt 1 at 20-01T00:00:00Z after 1 s: success (exit 0)\n"
    b"\r100%|\xe2\x96\x88\xe2\x96\x88\xe2\x96\x88\xe2\x96\x88\xe2\x96\x88| [00:00<00:00, "
    b"it/s, loss=0."
    b'[{"type":"append","path":"in/pretrain.log","stream":"","start":0,"end":1,'
    b'"pieces":[],"blob":1},'
    b'{"type":"status","status":{"time":1,"worker":"w-000001-","host":"","sealed":true,'
    b'"running":[{"run_id":"pretrain.0001.","stage":"pretrain","attempt":1,"started":1,'
    b'"progress":{"step":1,"total":1,"unit":"step","message":"epoch 1 of "},'
    b'"last_line":"\\u2588\\u2588\\u2588\\u2588| ","checkpoint":"",'
    b'"at_risk_since":null}],"waiting":[],'
    b'"ended":[{"number":1,"line":"run:","result":"success","cause":"exit 0","ended":1}],'
    b'"unsent_bytes":0,"unsent_since":null,"disk_free":1,'
    b'"machine":{"GPU":"% busy,  of  GiB","memory used":"%"},"problems":[],"leaving":"",'
    b'"heartbeat":20.0}},{"type":"ack","writer":"c-000001-","seq":1}]\n'
)
