"""Top-level domains of the IANA root zone (data.iana.org/TLD): all countries' and the common ones.

Brands and words that are names of files, units and methods (`zip`, `mov`, `service`) are left out on purpose;
`example` (RFC 2606) is in, because addresses of made-up people must become markers too.
"""

_COUNTRIES = """
ac ad ae af ag ai al am ao aq ar as at au aw ax az ba bb bd be bf bg bh bi bj bm bn bo br bs bt bw by bz ca cc cd cf
cg ch ci ck cl cm cn co cr cu cv cw cx cy cz de dj dk dm do dz ec ee eg er es et eu fi fj fk fm fo fr ga gd ge gf gg
gh gi gl gm gn gp gq gr gs gt gu gw gy hk hm hn hr ht hu id ie il im in io iq ir is it je jm jo jp ke kg kh ki km kn
kp kr kw ky kz la lb lc li lk lr ls lt lu lv ly ma mc md me mg mh mk ml mm mn mo mp mq mr ms mt mu mv mw mx my mz na
nc ne nf ng ni nl no np nr nu nz om pa pe pf pg ph pk pl pm pn pr ps pt pw py qa re ro rs ru rw sa sb sc sd se sg sh
si sk sl sm sn so sr ss st su sv sx sy sz tc td tf tg th tj tk tl tm tn to tr tt tv tw tz ua ug uk us uy uz va vc ve
vg vi vn vu wf ws ye yt za zm zw
"""
_GENERIC = """
academy aero africa agency app art asia bank berlin bio biz blog business capital care cat center city clinic cloud
club coach college com community company consulting coop dental design dev digital direct earth edu education email
energy engineering events example expert family finance foundation fun fund games global gmbh gov group guru health
house info ink institute insurance int international jobs land law legal life live london ltd management market
marketing media medical mil mobi money museum name net network news ngo nyc one online org paris partners
photography post press pro pub research school science services shop site social solutions space store studio swiss
systems team tech technology tel today tokyo tools top training travel university vip wiki work world xyz zone ελ
бел москва онлайн орг рус рф укр 中国 公司 網絡
"""
_DOMAINS = frozenset(f"{_COUNTRIES} {_GENERIC}".split())


def is_top_level(label: str) -> bool:
    """Whether a label, in any case, is a top-level domain; those in Punycode all count."""
    label = label.lower()
    return label in _DOMAINS or label.startswith("xn--")
