"""The style sheet and the script of the report. Both are part of the page, which loads nothing."""

CSS = """
:root{--bg:#f6f7f9;--card:#fff;--ink:#1b2330;--soft:#5d6878;--rule:#e3e7ee;--c1:#2563c9;--c2:#c2410c;
--c3:#0d8a6a;--c4:#8b5cf6;--pale:#a9bfe4;--good:#12805c;--bad:#b4233c;--goodbg:#e3f5ee;--badbg:#fbe9ec;
color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--bg:#11151c;--card:#1a202a;--ink:#e6eaf1;--soft:#98a4b6;
--rule:#2c3542;--c1:#6ea3f7;--c2:#f59e5b;--c3:#3ecba0;--c4:#b79bfb;--pale:#3f557d;--good:#58d3a6;
--bad:#f58397;--goodbg:#16342c;--badbg:#3b1f27}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,
-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1080px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:26px;margin:0}h2{font-size:18px;margin:36px 0 12px}
.sub{color:var(--soft);margin:2px 0 20px;overflow-wrap:anywhere}
.card,figure{background:var(--card);border:1px solid var(--rule);border-radius:10px;margin:0}
.card{padding:16px 18px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:12px}
.tiles .card{padding:14px 16px}
.tiles .card b{display:block;font-size:24px;line-height:1.25}.tiles .card span{color:var(--soft);
font-size:13.5px;line-height:1.3;display:block;overflow-wrap:anywhere}
.verdict{margin-top:12px;border-left:4px solid var(--c2)}.verdict.yes{border-left-color:var(--good)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(310px,1fr));gap:12px}
figure{padding:12px 14px 8px}.card+figure{margin-top:12px}
figcaption{display:flex;justify-content:space-between;gap:8px;align-items:baseline}
small,.soft{color:var(--soft)}svg{width:100%;height:auto;display:block;margin-top:6px}
svg text{fill:var(--soft);font-size:12px}svg .y{text-anchor:end}svg .x{text-anchor:middle}
.grid{stroke:var(--rule)}.land{fill:var(--rule)}.line{fill:none;stroke-width:2;stroke-linejoin:round}
.line.c1{stroke:var(--c1)}.line.c2{stroke:var(--c2)}.line.c3{stroke:var(--c3)}.line.c4{stroke:var(--c4)}
.line.pale{stroke:var(--pale);stroke-width:1.2}.line.dash{stroke:var(--soft);stroke-width:1;
stroke-dasharray:3 4}
.dot{stroke:var(--card);stroke-width:1.5}
.dot.c1{fill:var(--c1)}.dot.c2{fill:var(--c2)}.dot.c3{fill:var(--c3)}.dot.c4{fill:var(--c4)}
.dot.pale,.dot.dash{fill:var(--pale)}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12.5px;color:var(--soft);min-height:4px}
.legend i{display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:5px;
vertical-align:middle}
i.c1{background:var(--c1)}i.c2{background:var(--c2)}i.c3{background:var(--c3)}i.c4{background:var(--c4)}
i.pale{background:var(--pale)}i.dash{background:var(--soft)}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%}
th,td{padding:6px 10px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap;
font-variant-numeric:tabular-nums}
th{color:var(--soft);font-weight:600;white-space:normal;
overflow-wrap:anywhere;min-width:6.4em}th:first-child,td:first-child{text-align:left}
td.left{text-align:left;white-space:normal;overflow-wrap:anywhere}
tr:last-child td{border-bottom:0}tr.all td{font-weight:700}
.bar{display:inline-block;width:100%;min-width:120px;height:9px;border-radius:5px;background:var(--rule);
overflow:hidden}
.bar i{display:block;height:100%}
.picker{display:flex;gap:8px;align-items:center;flex-wrap:wrap;position:sticky;top:0;z-index:1;
background:var(--bg);padding:8px 0}
.picker[hidden]{display:none}
button,select{font:inherit;color:inherit;background:var(--card);border:1px solid var(--rule);
border-radius:7px;padding:5px 12px;cursor:pointer}button:disabled{opacity:.4;cursor:default}
.group{display:grid;grid-template-columns:minmax(120px,220px) 1fr;gap:18px;margin-bottom:12px}
.group>*{min-width:0}
.images{display:flex;flex-direction:column;gap:8px}
.images img{width:100%;border-radius:6px;border:1px solid var(--rule);display:block}
.images img.small{image-rendering:pixelated}
.prompt,.response span,pre{white-space:pre-wrap;overflow-wrap:anywhere}
.prompt{font-weight:600;margin-bottom:2px}.facts{color:var(--soft);margin-bottom:10px}
.responses{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:6px}
.responses.long{grid-template-columns:1fr}
.response{display:flex;justify-content:space-between;gap:10px;border-radius:6px;padding:4px 10px;
background:var(--badbg)}
.response.correct{background:var(--goodbg)}
.response b{color:var(--bad);font-variant-numeric:tabular-nums;white-space:nowrap}
.response.correct b{color:var(--good)}
pre{margin:0;font:12.5px/1.5 ui-monospace,"DejaVu Sans Mono",monospace}summary{cursor:pointer}
footer{color:var(--soft);margin-top:40px;font-size:13px}
@media(max-width:620px){.group{grid-template-columns:1fr}.images{max-width:220px}}
@media print{.picker{display:none}}
"""

# Without scripts every step is shown, one below the other.
SCRIPT = """
(function(){
var steps=[].slice.call(document.querySelectorAll('section[data-step]'));
var picker=document.querySelector('.picker');
if(!picker||!steps.length)return;
var select=picker.querySelector('select');
var back=picker.querySelector('.back'),next=picker.querySelector('.next');
function show(index){
steps.forEach(function(section,i){section.hidden=i!==index;});
select.selectedIndex=index;back.disabled=index===0;next.disabled=index===steps.length-1;
}
select.addEventListener('change',function(){show(select.selectedIndex);});
back.addEventListener('click',function(){show(select.selectedIndex-1);});
next.addEventListener('click',function(){show(select.selectedIndex+1);});
picker.hidden=false;show(steps.length-1);
})();
"""
