// Shows one step at a time. Without scripts every step is shown, one below the other.
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
// Plays episodes: shows one turn of one branch at a time. Arrow keys walk in the player that was used last.
(function(){
var used=null;
var players=[].slice.call(document.querySelectorAll('.player')).map(function(player){
var tabs=[].slice.call(player.querySelectorAll('.tabs button'));
var turns=[].slice.call(player.querySelectorAll('.turn'));
var walk=player.querySelector('.walk'),place=player.querySelector('.place');
var back=player.querySelector('.back'),next=player.querySelector('.next');
var path=[],index=0;
function show(to){
index=Math.max(0,Math.min(path.length-1,to));
turns.forEach(function(turn){turn.hidden=turn.dataset.turn!==path[index];});
place.textContent='turn '+(index+1)+' of '+path.length;
back.disabled=index===0;next.disabled=index===path.length-1;
}
function play(tab){
tabs.forEach(function(other){other.setAttribute('aria-pressed',other===tab);});
path=tab.dataset.turns.split(' ');show(0);
}
var self={move:function(by){show(index+by);},isSeen:function(){return player.offsetParent!==null;}};
tabs.forEach(function(tab){tab.addEventListener('click',function(){play(tab);});});
back.addEventListener('click',function(){self.move(-1);});
next.addEventListener('click',function(){self.move(1);});
player.addEventListener('click',function(){used=self;});
player.querySelector('.tabs').hidden=walk.hidden=false;play(tabs[0]);
return self;
});
document.addEventListener('keydown',function(event){
var by={ArrowLeft:-1,ArrowRight:1}[event.key];
if(!by||event.altKey||event.ctrlKey||event.metaKey||event.target.tagName==='SELECT')return;
var player=used&&used.isSeen()?used:players.filter(function(one){return one.isSeen();})[0];
if(player){player.move(by);event.preventDefault();}
});
})();
